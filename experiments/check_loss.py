"""Which objective, aggregation and advantage convention reproduce a loss that another trainer computed.

    python -m experiments.check_loss DUMP [--group-size G] [--clip-low W --clip-high W] [...]

DUMP is a .safetensors or .npz file of one loss call: logp, old_logp, mask [B, T], advantages [B] or [B, T] or
rewards [B], and the scalar loss; docs/check_loss.md names the optional entries. Exits 0 where a convention
reproduces the loss, 1 where none does, 2 where the dump cannot be used.
"""

import argparse
import sys
from collections.abc import Sequence

from moe_rl.objectives.diagnose import (
    Diagnosis,
    Dump,
    DumpError,
    Match,
    Settings,
    diagnose,
    peer_settings,
    read_dump,
    reproduce_advantages,
    solve_clip_width,
    why_indistinguishable,
)
from moe_rl.objectives.diagnose.explain import notes, peer_counts
from moe_rl.objectives.diagnose.search import agreeing_counts


def parse(arguments: Sequence[str] | None) -> tuple[str, int, Settings]:
    """(path, rows to print, settings) from the command line; argparse exits with 2 on a mistake."""
    parser = argparse.ArgumentParser("python -m experiments.check_loss", description=__doc__.splitlines()[0])
    parser.add_argument("dump", help=".safetensors or .npz")
    parser.add_argument("--clip-low", type=float, help="width below 1 that the trainer clips at")
    parser.add_argument("--clip-high", type=float, help="width above 1")
    parser.add_argument("--length-divisor", type=float, help="L of Dr.GRPO, tokens")
    parser.add_argument("--kl-coef", type=float, help="coefficient of the KL to ref_logp")
    parser.add_argument("--entropy-coef", type=float, help="coefficient of the entropy bonus")
    parser.add_argument("--group-size", type=int, help="responses per prompt, next to each other")
    parser.add_argument(
        "--tolerance", type=float, help="relative to the loss and the terms that cancel in it"
    )
    parser.add_argument("--departures", type=int, default=1, choices=(0, 1, 2), help="mistakes to allow")
    parser.add_argument("--top", type=int, default=8, help="matches to print")
    given = parser.parse_args(arguments)
    if (given.clip_low is None) != (given.clip_high is None):
        parser.error("--clip-low and --clip-high are given together")
    for name in ("clip_low", "clip_high", "length_divisor", "kl_coef", "entropy_coef", "tolerance"):
        if getattr(given, name) is not None and not getattr(given, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(given, name):g}")
    settings = Settings(
        clip=None if given.clip_low is None else (given.clip_low, given.clip_high),
        length_divisor=given.length_divisor,
        kl_coef=given.kl_coef,
        entropy_coef=given.entropy_coef,
        group_size=given.group_size,
        departures=given.departures,
        tolerance=given.tolerance,
    )
    return given.dump, given.top, settings


def check_settings(settings: Settings, dump: Dump) -> None:
    """DumpError where an option cannot go with this dump."""
    rows = len(dump.mask)
    if settings.group_size is not None and (settings.group_size < 1 or rows % settings.group_size):
        raise DumpError(f"--group-size must divide the {rows} responses, got {settings.group_size}")
    for option, value, entry in (
        ("--kl-coef", settings.kl_coef, dump.ref_logp),
        ("--entropy-coef", settings.entropy_coef, dump.entropy),
    ):
        if value is not None and entry is None:
            needed = "ref_logp" if option == "--kl-coef" else "entropy"
            raise DumpError(f"{option} needs the entry {needed} in the dump")


def table(matches: Sequence[Match]) -> str:
    """Conventions one a line, with what each makes of the loss."""
    rows = [("loss", "off by", "objective", "aggregation", "advantages", "departs by")]
    for match in matches:
        documented = [choice.name for choice in (match.term, match.factor) if choice.name and not choice.cost]
        rows.append(
            (
                f"{match.loss:.7g}",
                f"{match.error:.1e}",
                match.unit.policy.name,
                match.aggregation.name,
                match.advantages.name,
                "; ".join([*match.departures, *documented]) or "nothing",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)


def header(dump: Dump, diagnosis: Diagnosis) -> list[str]:
    rows, width = dump.mask.shape
    tokens = f"{int(dump.mask.sum())} of {rows * width} tokens"
    precision = f"{dump.loss_dtype} loss, {dump.value_dtype} tensors".replace("torch.", "")
    lines = [
        f"loss {dump.loss:.9g} of {rows} responses, {tokens}; {precision}",
        f"tried {diagnosis.tried} conventions; a match is within {diagnosis.tolerance:.1e} of the loss and "
        "the terms that cancel in it",
    ]
    lines += [f"WARNING: {doubt}" for doubt in dump.doubts]
    return lines + ([f"entries not used: {', '.join(dump.ignored)}"] if dump.ignored else [])


def counts(match: Match, dump: Dump) -> list[str]:
    """Clip fractions of a convention beside the names that peers log them under."""
    logged = dump.clip_frac
    agreeing = [] if logged is None else agreeing_counts(match.counts, logged)
    lines = [f"counts under the first ({match.unit.policy.name}):"]
    for name, value, peers in peer_counts(match):
        mark = "  <- the dump's clip_frac" if name in agreeing else ""
        lines.append(f"  {name:<26} {value:<10.5g} {peers}{mark}".rstrip())
    if logged is not None and not agreeing:
        lines.append(f"  none equals the dump's clip_frac, {logged:.5g}: another clip range or mask?")
    return lines


def matched(diagnosis: Diagnosis, dump: Dump, top: int) -> list[str]:
    matches, first = diagnosis.matches, diagnosis.matches[0]
    lines = [f"MATCH: {len(matches)} convention{'s' if len(matches) > 1 else ''}"]
    if diagnosis.chance >= 0.05:
        lines = [
            f"{lines[0]}, as far as this precision shows: about {diagnosis.chance:.1f} would come as near by "
            "chance, so dump in a wider dtype to be sure"
        ]
    lines.append(table(matches[:top]))
    if len(matches) > top:
        lines.append(f"  and {len(matches) - top} more (--top)")
    # A peer's settings give the documented part of a convention; its departure is no setting of theirs.
    scope = " without the departure" if first.departures else ""
    lines += [f"{peer}{scope}: {settings}" for peer, settings in peer_settings(first).items()]
    lines += [f"note: {note}" for note in notes(first)]
    reasons = why_indistinguishable(matches, dump)
    if len(matches) > 1:
        lines.append("this dump cannot tell them apart:")
        lines += [f"  - {reason}" for reason in reasons]
    return [*lines, *counts(first, dump)]


def unmatched(diagnosis: Diagnosis, dump: Dump) -> list[str]:
    lines = ["NO MATCH. The nearest, without a departure and with one:", table(diagnosis.nearest)]
    first = diagnosis.nearest[0]
    if first.loss:
        lines.append(f"the loss is {dump.loss / first.loss:.6g} times the first")
    lines += [f"note: {note}" for note in notes(first)]
    if diagnosis.coincidences:
        lines.append(
            f"{diagnosis.coincidences} conventions with departures come within the tolerance, but chance "
            f"would give about {diagnosis.chance:.1f}: no finding. Dump in a wider dtype, or give the clip "
            "range, divisor or coefficients that you know (--help)"
        )
    lines.append(
        "if none is near: does the loss belong to these tensors, without a router's auxiliary loss? "
        "Is its clip range a default one (--clip-low, --clip-high)?"
    )
    return [*lines, *counts(first, dump)]


def clip_range_lines(diagnosis: Diagnosis, dump: Dump, settings: Settings) -> list[str]:
    """What another clip range would explain, where no documented one explains loss and clip_frac."""
    first = diagnosis.matches[0] if diagnosis.matches else None
    disagrees = dump.clip_frac is not None and not (first and agreeing_counts(first.counts, dump.clip_frac))
    if settings.clip is not None or (first is not None and not disagrees):
        return []
    solved = solve_clip_width(dump, settings)[:3]
    if not solved:
        return ["no one clip width of GRPO or GSPO gives this loss" + (" and clip_frac" if disagrees else "")]
    proof = (
        "and the dump's clip_frac with it: another clip range is the likely difference"
        if dump.clip_frac is not None
        else "but one width always fits one number: a lead, to hold against the trainer's configuration"
    )
    return [f"a clip range of its own gives the loss, {proof}:", table(solved)]


def advantage_lines(dump: Dump, settings: Settings) -> list[str]:
    """Which convention makes the dump's advantages of its rewards, where it has both."""
    tolerance = 10 * max(dump.tolerances)
    found = reproduce_advantages(dump, settings.group_size or dump.group_size, tolerance)
    if not found:
        return []
    names = ", ".join(choice.name for choice, _ in found[:4])
    if found[0][1] <= tolerance:
        return [f"the advantages are the rewards under: {names} (off by {found[0][1]:.1e} at most)"]
    return [f"no convention makes the advantages of the rewards; nearest: {names}, off by {found[0][1]:.1e}"]


def main(arguments: Sequence[str] | None = None) -> int:
    path, top, settings = parse(arguments)
    try:
        dump = read_dump(path)
        check_settings(settings, dump)
    except DumpError as error:
        print(error, file=sys.stderr)
        return 2
    diagnosis = diagnose(dump, settings)
    found = matched(diagnosis, dump, top) if diagnosis.matches else unmatched(diagnosis, dump)
    found += clip_range_lines(diagnosis, dump, settings)
    print("\n".join([*header(dump, diagnosis), *found, *advantage_lines(dump, settings)]))
    return 0 if diagnosis.matches else 1


if __name__ == "__main__":
    sys.exit(main())
