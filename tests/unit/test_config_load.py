"""Precedence of flags, variables and files; where each value came from; what a refusal says."""

from pathlib import Path

import pytest

from grinf.config.fields import presentation
from grinf.config.load import resolve
from grinf.config.parse import Score, Sla
from grinf.config.settings import (
    MODELS,
    SWEEP_AXES,
    BenchSettings,
    BuildTrieSettings,
    DoctorSettings,
    RecallSettings,
)
from grinf.errors import UsageError

GIVEN = {"input": ["q.parquet"], "model": "m", "trie": "t.grtrie"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder without settings, and an environment without ours."""
    monkeypatch.chdir(tmp_path)
    for name in {name for model in MODELS.values() for name in model.model_fields} | {"config"}:
        monkeypatch.delenv(f"GRINF_{name.upper()}", raising=False)
    return tmp_path


def refusal(model, flags, config=None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolve(model, flags, config)
    return caught.value


def test_each_source_wins_over_the_next(folder, monkeypatch):
    Path("grinf.toml").write_text(
        'model = "local"\ntrie = "local"\ntop_k = 1\nlimit = 1\n[recall]\nview = "local"\n'
    )
    Path("job.toml").write_text('model = "job"\ntop_k = 2\nlimit = 2\n')
    monkeypatch.setenv("GRINF_TOP_K", "3")
    monkeypatch.setenv("GRINF_LIMIT", "3")
    settings = resolve(RecallSettings, {"input": ["q"], "limit": "4", "top_k": None}, Path("job.toml"))
    values = (settings.trie, settings.view, settings.model, settings.top_k, settings.limit, settings.expand)
    assert values == (Path("local"), "local", Path("job"), 3, 4, "all")
    origins = [settings.origin[name] for name in ("trie", "view", "model", "top_k", "limit", "expand")]
    assert origins == [
        "grinf.toml: trie",
        "grinf.toml: [recall] view",
        "job.toml: model",
        "GRINF_TOP_K",
        "--limit",
        "default",
    ]


def test_the_environment_may_name_the_file(folder, monkeypatch):
    Path("job.toml").write_text("top_k = 7\n")
    monkeypatch.setenv("GRINF_CONFIG", "job.toml")
    assert resolve(RecallSettings, GIVEN).top_k == 7


def test_a_command_s_table_wins_over_shared_keys_and_other_tables_do_not_matter(folder):
    Path("grinf.toml").write_text(
        'beams = 900\n[recall]\nbeams = "20-300"\n[bench]\nbeams = "5"\n[demo]\nseed = 4\n'
    )
    settings = resolve(RecallSettings, GIVEN)
    assert (settings.beams, settings.seed) == ((20, 300), 0)


def test_a_sweep_table_gives_the_axes_of_bench(folder):
    Path("sweep.toml").write_text(
        'name = "article"\nbeams = 1\n[bench]\nbudget = "40m"\n'
        '[sweep]\ninput_len = [100, "200:400:100"]\nbeams = ["900", "20-300-900"]\nconstrained = "both"\n'
    )
    settings = resolve(BenchSettings, {"sla": ["p99:100ms", "avg:60ms"]}, Path("sweep.toml"))
    assert settings.input_len == (100, 200, 300, 400)
    assert settings.beams == ((900,), (20, 300, 900))
    assert settings.origin["beams"] == "sweep.toml: [sweep] beams"
    assert settings.sla == (Sla("p99", 100_000_000), Sla("avg", 60_000_000))
    assert (settings.name, settings.budget) == ("article", 40 * 60 * 10**9)


def test_every_axis_of_a_sweep_is_a_setting_of_bench():
    assert set(SWEEP_AXES) <= set(BenchSettings.model_fields)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('modl = "m"', ["grinf.toml", "'modl'", "did you mean 'model'?"]),
        ("[recal]\ntop_k = 1", ["table", "'recal'", "did you mean 'recall'?"]),
        ("[recall]\nbemas = 1", ["[recall]", "'bemas'", "did you mean 'beams'?"]),
        ("[demo]\nbeams = 1", ["[demo]", "'beams'"]),
        ("[sweep]\nbudget = '1m'", ["[sweep]", "'budget'"]),
        ("model = = 1", ["grinf.toml", "not a TOML file", "line 1"]),
        ("top_k = 0", ["grinf.toml: top_k", "greater than or equal to 1"]),
        ("seed = -3", ["grinf.toml: seed", "greater than or equal to 0"]),
        ("top_k = 3.5", ["grinf.toml: top_k", "3.5"]),
        ("top_k = true", ["grinf.toml: top_k", "True"]),
        ("[recall]\nbeams = [20, 300]", ["grinf.toml: [recall] beams", "'20,300'", "20-300-900"]),
        ("beams = true", ["grinf.toml: beams", "True"]),
        ('constrained = "perhaps"', ["constrained", "neither true nor false"]),
        ('expand = "al"', ["grinf.toml: expand", "did you mean 'all'?"]),
        ('[recall]\ninput = ""', ["[recall] input", "empty"]),
        ("score_margin = nan", ["score_margin", "finite"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place_and_the_way_out(content, told):
    Path("grinf.toml").write_text(content)
    flags = {name: value for name, value in GIVEN.items() if name not in content}
    message = str(refusal(RecallSettings, flags))
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in MODELS.values() for name in model.model_fields if name.endswith("_column")],
)
def test_a_column_without_a_name_is_refused(model, name):
    needed = {other: ["a.parquet"] for other, field in model.model_fields.items() if field.is_required()}
    assert refusal(model, needed | {name: ""}).what == f"--{name.replace('_', '-')}: '' is refused"


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_config_that_is_missing_or_no_text_is_refused(content):
    if content is not None:
        Path("job.toml").write_bytes(content)
    assert "job.toml" in refusal(RecallSettings, GIVEN, Path("job.toml")).what


def test_a_variable_is_named_where_its_value_is_refused(monkeypatch):
    monkeypatch.setenv("GRINF_BEAMS", "20-")
    assert refusal(RecallSettings, GIVEN).what.startswith("GRINF_BEAMS: ")


def test_what_must_be_given_is_named_as_the_command_line_has_it():
    assert refusal(RecallSettings, {}).fix == "add --input Q to the command, or `input = ...` to grinf.toml"
    assert refusal(BuildTrieSettings, {}).fix == "add ITEMS to the command, or `items = ...` to grinf.toml"


def test_an_unknown_flag_field_is_refused():
    assert "'itmes'" in refusal(BuildTrieSettings, {"itmes": ["a"]}).what


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"model": None}, "no model given"),
        ({"trie": None}, "no trie given"),
        ({"score_margin": "-1"}, "below 0"),
        ({"min_beams": "5"}, "no margin"),
        ({"memory_fraction": "1.5"}, "no share"),
        ({"kernels": "select_constrained"}, "names no implementation"),
        ({"kernels": "swiglu=torch,swiglu=cupy"}, "an op twice"),
        ({"constrained": False, "view": "fresh"}, "--view needs a trie"),
        ({"constrained": False, "deny_column": "seen"}, "--deny-column needs a trie"),
        ({"constrained": False, "score": "level"}, "--score level needs a trie"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags, told):
    assert told in refusal(RecallSettings, GIVEN | flags).what


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"sid_column": "s", "sid_columns": "a,b"}, "exclude each other"),
        ({"tokenizer": "d"}, "belong together"),
        ({"token_template": "<{code}>"}, "belong together"),
        ({"tokenizer": "d", "token_template": "<{code}>", "token_base": "1,2"}, "exclude each other"),
    ],
)
def test_sources_of_a_trie_that_contradict_each_other_are_refused(flags, told):
    assert told in refusal(BuildTrieSettings, {"items": ["a.parquet"]} | flags).what


def test_a_search_without_a_trie_needs_none():
    assert resolve(RecallSettings, GIVEN | {"constrained": False, "trie": None}).trie is None


def test_settings_cannot_be_changed():
    settings = resolve(RecallSettings, GIVEN)
    with pytest.raises(ValueError, match="frozen"):
        settings.top_k = 3


def test_engine_options_hold_what_is_set_and_nothing_else():
    settings = resolve(
        DoctorSettings, {"model": "m", "score": "topk:50", "max_batch": "4", "kernels": "swiglu=torch"}
    )
    assert settings.engine_options() == {
        "model": "m",
        "score": "topk",
        "score_k": 50,
        "min_beams": 1,
        "device": "auto",
        "dtype": "auto",
        "max_batch": 4,
        "graphs": True,
        "seed": 0,
        "kernels": {"swiglu": "torch"},
    }
    assert resolve(DoctorSettings, {"score": "vocab"}).score == Score("vocab")


def test_engine_options_are_fields_of_the_engine_s_options():
    from grinf.backend.interface import EngineOptions

    settings = resolve(DoctorSettings, {"model": "m", "memory_fraction": "0.5", "workspace_bytes": "1MiB"})
    options = EngineOptions(**settings.engine_options())
    assert (options.memory_fraction, options.workspace_bytes) == (0.5, 1 << 20)


def test_several_gpus_are_several_devices():
    assert resolve(DoctorSettings, {"device": "cuda:0,cuda:2"}).devices == ("cuda:0", "cuda:2")


def test_help_tells_defaults_as_they_are_spelled():
    shown = presentation(BenchSettings)
    assert shown["sla"].default == "p99:100ms"
    assert shown["arrival"].metavar == "poisson|closed"
    assert shown["graphs"].negatable
    assert presentation(BuildTrieSettings)["overwrite"].switch
    assert not presentation(BuildTrieSettings)["overwrite"].negatable
    assert presentation(RecallSettings)["beams"].default == "900"
