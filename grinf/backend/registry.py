"""Op -> implementations -> one table, resolved once at start. After that nothing falls back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grinf.errors import KernelUnavailable, UsageError
from grinf.ops import contracts


@dataclass(frozen=True, slots=True)
class Site:
    """Where and for what the ops will run.

    Attributes:
        device: `cpu` or `cuda`.
        sm: Compute capability as major * 10 + minor; None on a CPU.
        dtype: Compute dtype.
        head_dim, group: Of the model's attention; group is query heads per key-value head.
        page_size: Tokens per ContextKV page.
    """

    device: str
    sm: int | None
    dtype: str
    head_dim: int
    group: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What an implementation asks of a site; None asks nothing.

    Attributes:
        missing: A library that the implementation needs and that is not there, in words; empty: nothing is
            missing.
    """

    device: str | None = None
    sm_min: int | None = None
    sm_max: int | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    missing: str = ""

    def rejects(self, site: Site) -> str | None:
        """Why the implementation cannot run at `site`; None if it can."""
        if self.device is not None and site.device != self.device:
            return f"needs a {self.device} device"
        if self.missing:
            return self.missing
        if self.sm_min is not None and (site.sm is None or site.sm < self.sm_min):
            return f"needs compute capability {self.sm_min / 10:.1f} or newer"
        if self.sm_max is not None and site.sm is not None and site.sm > self.sm_max:
            return f"is built for compute capability {self.sm_max / 10:.1f} or older"
        for name, allowed, value in (
            ("dtype", self.dtypes, site.dtype),
            ("head_dim", self.head_dims, site.head_dim),
            ("query heads per key-value head", self.groups, site.group),
        ):
            if allowed is not None and value not in allowed:
                return f"{name} {value} is not among {', '.join(map(str, allowed))}"
        return None


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        op: Field of `Ops`.
        name: Spelled `torch`, `cupy`, `cupy_sm90`, ...
        needs: Where it runs.
        rank: Higher wins among those that run.
        load: Builds the callable for a site; compiles what must be compiled.
        capturable: Whether its result depends on tensors alone, so that a graph may hold it.
        is_reference: A GPU gets it in float32, or by name; never because nothing better fits.
    """

    op: str
    name: str
    needs: Needs
    rank: int
    load: Callable[[Site], Callable[..., Any]]
    capturable: bool = True
    is_reference: bool = False

    def rejects(self, site: Site, *, by_name: bool) -> str | None:
        """Why it is not used at `site`; None if it is."""
        reason = self.needs.rejects(site)
        is_slow = self.is_reference and site.device == "cuda" and site.dtype != "float32"
        if reason is None and is_slow and not by_name:
            return f"is the slow reference, which --kernels {self.op}={self.name} asks for"
        return reason


@dataclass(frozen=True, slots=True)
class Ops:
    """The resolved table: what the steps call.

    Attributes:
        names: Implementation of each op.
        eager: Ops whose implementation no graph may hold.
    """

    qk_norm_rope_write: contracts.QkNormRopeWrite
    add_rms_norm: contracts.AddRmsNorm
    swiglu: contracts.SwiGlu
    prefill_attention: contracts.PrefillAttention
    decode_attention: contracts.DecodeAttention
    row_logsumexp: contracts.RowLogSumExp
    select_constrained: contracts.SelectConstrained
    select_unconstrained: contracts.SelectUnconstrained
    extend_path: contracts.ExtendPath
    names: Mapping[str, str]
    eager: frozenset[str]


OPS = tuple(field for field in Ops.__dataclass_fields__ if field not in ("names", "eager"))
PARTS = ("context_attention", "beam_attention", "merge_attention")
"""Ops that a decode attention may be composed of; tested and timed on their own, never called by a step."""


class KernelRegistry:
    """All implementations that this installation knows."""

    def __init__(self, implementations: Iterable[Implementation]) -> None:
        self._implementations = tuple(implementations)

    def candidates(self, op: str) -> tuple[Implementation, ...]:
        """Implementations of `op`, best first."""
        return tuple(sorted((i for i in self._implementations if i.op == op), key=lambda i: -i.rank))

    def choose(self, op: str, site: Site, override: str | None = None) -> Implementation:
        """The implementation of `op` to use at `site`.

        Raises:
            KernelUnavailable: None fits; lists each candidate and why.
            UsageError: `override` names no implementation.
        """
        candidates = self.candidates(op)
        if override is not None:
            candidates = tuple(i for i in candidates if i.name == override)
            if not candidates:
                known = ", ".join(i.name for i in self.candidates(op))
                raise UsageError(
                    f"kernels.{op} = {override!r} is not an implementation", f"there are: {known}"
                )
        reasons = []
        for implementation in candidates:
            reason = implementation.rejects(site, by_name=override is not None)
            if reason is None:
                return implementation
            reasons.append(f"{implementation.name}: {reason}")
        raise KernelUnavailable(
            f"no implementation of {op} fits {_spell(site)}",
            "; ".join(reasons),
            "run `grinf doctor` for what this machine supports, or use --device cpu",
        )

    def resolve(self, site: Site, overrides: Mapping[str, str] | None = None) -> Ops:
        """Decide every op for `site` and load it.

        Raises:
            KernelUnavailable, UsageError: As `choose`; also an override for an op that does not exist.
        """
        overrides = overrides or {}
        unknown = sorted(set(overrides) - set(OPS))
        if unknown:
            raise UsageError(f"kernels.{unknown[0]} is not an op", f"ops are: {', '.join(OPS)}")
        chosen = {op: self.choose(op, site, overrides.get(op)) for op in OPS}
        loaded = {op: implementation.load(site) for op, implementation in chosen.items()}
        names = {op: implementation.name for op, implementation in chosen.items()}
        eager = frozenset(op for op, implementation in chosen.items() if not implementation.capturable)
        return Ops(**loaded, names=names, eager=eager)


def reference_implementations() -> list[Implementation]:
    """The torch reference of every op: runs anywhere, and serves CPUs, and float32 where nothing else does.

    Its prefill attention takes the borders of the prompts from the host, which a graph would freeze.
    """
    from grinf.ops import reference

    return [
        Implementation(
            op,
            "torch",
            Needs(),
            0,
            lambda _, op=op: getattr(reference, op),
            capturable=op != "prefill_attention",
            is_reference=True,
        )
        for op in (*OPS, *PARTS)
    ]


def _spell(site: Site) -> str:
    capability = "" if site.sm is None else f"capability {site.sm / 10:.1f}, "
    return f"{site.device} ({capability}dtype {site.dtype}, head_dim {site.head_dim}, group {site.group})"


def default_registry() -> KernelRegistry:
    """Everything that this installation has: the reference, what torch brings, and our kernels."""
    from grinf.backend.cuda import cupy_implementations
    from grinf.backend.library import library_implementations

    return KernelRegistry([*reference_implementations(), *library_implementations(), *cupy_implementations()])
