"""What a user may set, a frozen, strict model per command: a field is a flag, a variable and a file key."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from grinf.config.fields import (
    Beams,
    BeamsList,
    Bytes,
    Column,
    Count,
    Device,
    Dtype,
    DurationNs,
    File,
    Files,
    Int,
    Ints,
    Names,
    Number,
    Range,
    Rejects,
    ScoreMode,
    Scores,
    Slas,
    Specs,
    Switch,
    refuse,
    setting,
)
from grinf.config.parse import Quota, Score, Sla

KEEP = "Replace an output made with other inputs or settings."
TRY = "Check everything and say what would be done."


LEAST_MEMORY = 64 << 20
"""Bytes within which a catalogue can be built out of core."""


class Settings(BaseModel):
    """What all settings share: frozen, strict, and each value knows where it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origin(self) -> dict[str, str]:
        """Where each value came from: `--flag`, `GRINF_NAME`, `FILE: [table] key`, or `default`."""
        return self._origin

    def spelled(self) -> dict[str, Any]:
        """Give every value that is set as a flag or a file spells it; reading that gives equal settings."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in values.items() if value not in ("", [])}


class EngineSettings(Settings):
    """What the engine needs to know, whichever command starts it."""

    model: File | None = setting(
        None, "Checkpoint folder, or an architecture file (seeded random weights).", "DIR"
    )
    trie: File | None = setting(None, "Trie of the catalogue.", "FILE")
    levels: Count | None = setting(None, "Tokens per SID.", "N", shown="the trie's depth, else 3")
    score: ScoreMode = setting(Score("vocab"), "Normaliser: vocab, level, children or topk[:K].", "MODE")
    score_margin: Number | None = setting(None, "Drop beams this far below the best one.", "NATS")
    min_beams: Count = setting(1, "Beams that the margin keeps at least.", "N")
    device: Device = setting(
        "auto", "auto, cpu, or GPUs as 0,1 or cuda:0,cuda:1.", "DEVICE", panel="Engine", short="--devices"
    )
    dtype: Dtype = setting("auto", "Compute dtype.", panel="Engine")
    max_batch: Count | None = setting(None, "Requests at a time.", "N", panel="Engine", shown="8")
    max_batch_tokens: Count | None = setting(
        None, "Prompt tokens of one prefill.", "N", panel="Engine", shown="8192"
    )
    max_context: Count | None = setting(
        None, "Longest prompt, tokens.", "N", panel="Engine", shown="the model's, up to 8,192"
    )
    page_size: Count | None = setting(
        None, "Tokens per page of ContextKV.", "N", panel="Engine", shown="the device's"
    )
    memory_fraction: Number | None = setting(
        None, "Share of free memory to use.", "F", panel="Engine", shown="0.85"
    )
    workspace_bytes: Bytes | None = setting(
        None, "Most memory for logits.", "SIZE", panel="Engine", shown="1GiB"
    )
    graphs: Switch = setting(True, "Replay steps as CUDA graphs.", panel="Engine")
    kernels: Names = setting((), "Implementations to take, as op=name,op=name.", "LIST", panel="Engine")
    seed: Int = setting(0, "Seed of random weights and random choices.", "N", panel="Engine")

    @property
    def devices(self) -> tuple[str, ...]:
        """Each device; several give a process each."""
        return tuple(self.device.split(","))

    def engine_options(self) -> dict[str, Any]:
        """Give what is set as arguments of `EngineOptions`; `beams` is the caller's to add."""
        ours = {"model", "trie", "score", "kernels"}
        names = [name for name in EngineSettings.model_fields if name not in ours]
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        kernels = dict(choice.split("=", 1) for choice in self.kernels)
        return options | {
            "model": str(self.model),
            "score": self.score.mode,
            "score_k": self.score.k,
            "kernels": kernels,
        }

    @model_validator(mode="after")
    def _engine_fits_together(self) -> Self:
        share, margin = self.memory_fraction, self.score_margin
        if share is not None and not 0 < share <= 1:
            raise refuse(f"--memory-fraction {share} is no share", fix="give a number above 0, up to 1")
        if margin is not None and margin < 0:
            raise refuse(f"--score-margin {margin} is below 0", "no beam is better than the best")
        if margin is None and self.min_beams > 1:
            raise refuse(
                f"--min-beams {self.min_beams} has no margin to limit", fix="add --score-margin NATS"
            )
        for choice in (choice for choice in self.kernels if "=" not in choice):
            raise refuse(f"--kernels {choice} names no implementation", fix=f"write {choice}=torch")
        if len(self.kernels) > len({choice.partition("=")[0] for choice in self.kernels}):
            raise refuse(f"--kernels {','.join(self.kernels)} names an op twice", fix="leave one out")
        return self


class BuildTrieSettings(Settings):
    """`grinf build-trie`."""

    items: Files = setting(
        ..., "Files of items: parquet, JSON, JSON lines or .npy.", "ITEMS", positional=True, many=True
    )
    output: File | None = setting(None, "Trie to write.", "FILE", short="-o", shown="tries/<stem>.grtrie")
    item_column: Column | None = setting(None, "Column of item ids.", "NAME", shown="found by name")
    sid_column: Column | None = setting(None, "Column of SIDs.", "NAME", shown="found by name")
    sid_columns: Names | None = setting(None, "One column per level.", "A,B,C")
    sid_format: str = setting(
        "auto", "auto, codes, tokens, token-ids, packed:KxL, or regex:PATTERN.", "FORMAT"
    )
    codebook_sizes: Ints | None = setting(None, "Codes per level.", "K,K,K", shown="largest code + 1")
    offset_codes: Switch = setting(False, "Codes of a level start where the level before ends.")
    weight_column: Column | None = setting(None, "Column that orders the items of one SID.", "NAME")
    tokenizer: File | None = setting(None, "Tokenizer that knows the SID tokens.", "DIR", panel="Tokens")
    token_template: str | None = setting(
        None, "Token of a code, as <s_{letter}_{code}>.", "TEMPLATE", panel="Tokens"
    )
    token_base: Ints | None = setting(None, "Token id of code 0, per level.", "ID,ID,ID", panel="Tokens")
    end_token: str | None = setting(
        None, "Token that ends a SID shorter than the deepest.", "TOKEN", panel="Tokens"
    )
    on_bad_row: Literal["error", "drop"] = setting("error", "What a row that cannot be read does.")
    on_item_conflict: Literal["error", "first", "all"] = setting("error", "An item with several SIDs.")
    memory_limit: Bytes | None = setting(None, "Build out of core within this much memory.", "SIZE")
    overwrite: Switch = setting(False, KEEP)
    dry_run: Switch = setting(False, "Read and check every row, and write nothing.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.codebook_sizes and min(self.codebook_sizes) < 1:
            given = ",".join(map(str, self.codebook_sizes))
            raise refuse(f"--codebook-sizes {given}: a level has no codes", fix="each is at least 1")
        if self.memory_limit is not None and self.memory_limit < LEAST_MEMORY:
            what = f"--memory-limit is {self.memory_limit:,} bytes"
            raise refuse(what, "a batch of rows alone takes more", f"give {LEAST_MEMORY >> 20}MiB or more")
        if self.sid_column and self.sid_columns:
            raise refuse("--sid-column and --sid-columns exclude each other", fix="give the one that fits")
        if self.tokenizer and self.token_base:
            raise refuse(
                "--tokenizer and --token-base exclude each other", fix="give one source of token ids"
            )
        if (self.tokenizer is None) != (self.token_template is None):
            raise refuse(
                "--tokenizer and --token-template belong together",
                "the template says how the tokenizer spells a code",
                "add the other one, as --tokenizer DIR --token-template '<s_{letter}_{code}>'",
            )
        return self


class RecallSettings(EngineSettings):
    """`grinf recall`."""

    input: Files = setting(..., "Parquet file, folder or pattern of queries.", "Q", many=True)
    output: File | None = setting(
        None, "FILE.parquet or DIR.", "OUT", short="-o", shown="results/<stem>.recall.parquet"
    )
    beams: Beams = setting((900,), "Beams kept: 900, or one width per level, 20-300-900.", "BEAMS")
    constrained: Switch = setting(True, "Keep every beam on a path of the trie.")
    top_k: Count | None = setting(None, "SIDs returned per query.", "N", shown="every beam")
    expand: Literal["all", "top1"] = setting("all", "Items returned per SID.")
    view: str | None = setting(None, "Named view of the trie to search in.", "NAME")
    input_column: Column | None = setting(
        None, "Column of prompts.", "NAME", panel="Columns", shown="found by name"
    )
    allow_column: Column | None = setting(
        None, "Column of item ids; only these are returned.", "NAME", panel="Columns"
    )
    deny_column: Column | None = setting(
        None, "Column of item ids that are never returned.", "NAME", panel="Columns"
    )
    truth_column: Column | None = setting(
        None, "Column of relevant items, for metrics.", "NAME", panel="Columns"
    )
    template: str | None = setting(None, "Text around {prompt} or {history}, or chat.", "TEMPLATE")
    suffix: Names = setting((), "Tokens appended to each prompt, as <|sid_begin|>.", "TOK,TOK")
    executor: Literal["local", "ray"] = setting("local", "Where the units of work run.")
    on_error: Literal["reject", "fail"] = setting("reject", "What a query that cannot be served does.")
    allow_rejects: Rejects = setting(Quota(0, False), "Rejected queries without exit code 4.", "N|PCT")
    abort_rejects: Rejects = setting(
        Quota(50, True), "Rejected queries that end the job, once 1,000 are done.", "N|PCT"
    )
    unit_rows: Count = setting(2048, "Queries that are answered and committed together.", "N")
    resume: Switch = setting(True, "Go on where an interrupted job stopped.")
    limit: Count | None = setting(None, "Read only the first N queries.", "N")
    overwrite: Switch = setting(False, KEEP)
    dry_run: Switch = setting(False, TRY)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.model is None:
            raise refuse("no model given", fix='add --model DIR, or `model = "DIR"` to grinf.toml')
        if self.constrained and self.trie is None:
            fix = "add --trie FILE (made by `grinf build-trie`), or --no-constrained to search all token ids"
            raise refuse("no trie given", "a constrained search needs the catalogue", fix)
        if not self.constrained:
            self._refuse_what_needs_a_trie()
        return self

    def _refuse_what_needs_a_trie(self) -> None:
        asked = {"--view": self.view, "--allow-column": self.allow_column, "--deny-column": self.deny_column}
        if self.score.mode in ("level", "children"):
            asked[f"--score {self.score}"] = self.score.mode
        for flag in (flag for flag, value in asked.items() if value is not None):
            raise refuse(
                f"{flag} needs a trie", "--no-constrained searches all token ids", f"leave out {flag}"
            )


class BenchSettings(EngineSettings):
    """`grinf bench`."""

    sla: Slas = setting((Sla("p99", 100_000_000),), "Latency to keep, [STAT:]DURATION.", "SLA", many=True)
    input_len: Range | None = setting(None, "Prompt lengths, 100:1000:100.", "LIST", shown="the device's")
    beams: BeamsList | None = setting(None, "Schedules, 900,20-300-900.", "LIST", shown="the device's")
    constrained: Literal["off", "on", "both"] = setting("off", "Search with a trie, without, or both.")
    catalog: Specs | None = setting(
        None,
        "Trie, or synthetic:items=1M,levels=3,codebook=8192,skew=1.1.",
        "SPEC",
        many=True,
        shown="--trie",
    )
    scores: Scores = setting((), "Score modes to sweep.", "LIST", shown="--score")
    arrival: Literal["poisson", "closed"] = setting("poisson", "How requests arrive.")
    preset: Literal["smoke", "quick", "standard", "thorough"] | None = setting(
        None, "How many requests prove a rate.", shown="the device's"
    )
    budget: DurationNs | None = setting(None, "Time for the whole run.", "DURATION")
    engine: str = setting(
        "grinf", "grinf[:graphs=off,...], hf, or sim:base=9ms,per_req=4.5ms,max_batch=16.", "SPEC"
    )
    versus: str | None = setting(None, "Engine to take turns with, instead of searching for a rate.", "SPEC")
    aa: Switch = setting(False, "Take turns with itself: shows what difference this machine can see.")
    interleave: Count = setting(10, "Pairs of turns of --versus and --aa.", "N")
    verify: Int = setting(16, "Answers to check before measuring.", "N")
    resume: Switch = setting(False, "Go on with the newest run of these settings.")
    output: File = setting(Path("results"), "Folder of runs.", "DIR", short="-o")
    name: str = setting("bench", "Word in the name of the run's folder.", "WORD")
    dry_run: Switch = setting(False, "Print the grid and an estimate of its time.")


SWEEP_AXES = ("input_len", "beams", "constrained", "catalog", "scores")
"""Keys of the `[sweep]` table of a bench configuration: the axes of its grid."""


class MakeSidsSettings(Settings):
    """`grinf make-sids`."""

    embeddings: Files = setting(
        ..., "Parquet files of item embeddings.", "EMBEDDINGS", positional=True, many=True
    )
    output: File | None = setting(
        None, "Parquet file to write.", "FILE", short="-o", shown="<stem>.sids.parquet"
    )
    item_column: Column | None = setting(None, "Column of item ids.", "NAME", shown="found by name")
    embedding_column: Column | None = setting(None, "Column of vectors.", "NAME", shown="found by name")
    levels: Count = setting(3, "Codes per SID.", "N")
    codebook_size: Count = setting(256, "Codes per level.", "K")
    balanced: Switch = setting(False, "Give the codes of a level about equally many items.")
    unique: Switch = setting(False, "Give every item a SID of its own, by its last code.")
    seed: Int = setting(0, "Seed of the clustering.", "N")
    overwrite: Switch = setting(False, KEEP)
    dry_run: Switch = setting(False, TRY)


class DoctorSettings(EngineSettings):
    """`grinf doctor`: it checks what the engine's settings name."""


class DemoSettings(Settings):
    """`grinf demo`."""

    full: Switch = setting(False, "The whole catalogue (10 minutes), not one chapter (90 seconds).")
    output: File = setting(Path("demo"), "Folder for the demo's files.", "DIR", short="-o")
    seed: Int = setting(0, "Seed of the split and of the training.", "N")
    overwrite: Switch = setting(False, "Make the files again.")


MODELS: dict[str, type[Settings]] = {
    "build-trie": BuildTrieSettings,
    "recall": RecallSettings,
    "bench": BenchSettings,
    "make-sids": MakeSidsSettings,
    "doctor": DoctorSettings,
    "demo": DemoSettings,
}
