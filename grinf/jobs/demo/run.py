"""The demo from start to end."""

from collections.abc import Callable

from grinf.config.settings import DemoSettings
from grinf.jobs.demo.catalogue import find_tabular_list
from grinf.jobs.demo.files import DemoFiles
from grinf.jobs.demo.make import CHAPTER, FULL, DemoPlan, make
from grinf.jobs.demo.product import BEAMS, build_trie, compare_widths, recall_at, score, search, show_answers
from grinf.jobs.demo.report import DemoReport
from grinf.jobs.demo.stages import Stages
from grinf.jobs.demo.tokenizer import SID_BEGIN, TOKEN_TEMPLATE
from grinf.jobs.extras import require


def run_demo(
    settings: DemoSettings, on_progress: Callable[[str, int, int | None], None], plan: DemoPlan | None = None
) -> DemoReport:
    """Make the demo's files in `settings.output`, write `grinf.toml`, and try the commands on them.

    Args:
        settings: Of the command.
        on_progress: Called with (stage, done, total).
        plan: Sizes; None: those of the settings.

    Raises:
        UsageError: A file of someone else is in the way.
        EnvironmentFault: The data, or a package of the extra `demo`, is not installed.
    """
    require("demo", "bm25s", "sklearn")
    tabular_list = find_tabular_list()
    plan = plan or (FULL if settings.full else CHAPTER)
    files = DemoFiles(settings)
    if earlier := files.claim():
        return earlier
    stages = Stages(on_progress)
    made = make(plan, tabular_list, files, settings.seed, stages)
    files.write_settings(TOKEN_TEMPLATE, SID_BEGIN, BEAMS)
    build_trie(files, stages)
    whole = search(files, stages)
    num_compared = min(plan.max_compared, len(made.test))
    report = DemoReport(
        num_items=len(made.catalogue.items),
        num_train=len(made.train),
        num_test=len(made.test),
        num_compared=num_compared,
        num_parameters=made.num_parameters,
        steps=plan.steps,
        loss=made.loss,
        systems=(*made.baselines, score(whole)),
        recall=recall_at(whole),
        widths=tuple(compare_widths(files, stages, whole, num_compared)),
        answers=tuple(show_answers(files, made.catalogue, made.test)),
        seconds=stages.seconds,
        items=files.items,
        queries=files.queries,
        model=files.model,
        trie=files.trie,
    )
    files.keep(report)
    return report
