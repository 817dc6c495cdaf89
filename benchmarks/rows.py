"""From the workers' answers to the rows of the file: a system, a phase, its seconds and the shares of the peak."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.costs import PEAKS, shares, work_of
from benchmarks.systems import named

Answers = Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]


def make_rows(
    name: str, shape: Mapping, config: Mapping, about: Mapping, measured: Mapping, answers: Answers
) -> tuple[list[dict], dict]:
    """The rows, and by precision the device's peaks and where they are from.

    Args:
        measured: by label, the device's peaks.
        answers: by label, phase and round; rounds below 0 are warm-ups, compiling among the first.
    """
    peaks = {precision: _peaks(about, measured, precision) for precision in ("float32", "bfloat16")}
    rows = []
    for label in answers:
        precision = named(label)[1]
        for phase, timed in _phases(answers[label]).items():
            seconds = [timed[number]["seconds"] for number in sorted(timed) if number >= 0]
            if not seconds:
                continue
            later = [timed[number] for number in sorted(timed) if number >= 0]
            row = {
                "system": label,
                "shape": name,
                "phase": phase,
                "precision": precision,
                "seconds": {"median": float(np.median(seconds)), "min": min(seconds), "max": max(seconds)},
                "rounds": seconds,
                "first_seconds": timed[min(timed)]["seconds"],
                "third_seconds": timed[sorted(timed)[2]]["seconds"] if len(timed) > 2 else None,
                "repeats": len(seconds),
                "versions": about[label]["versions"],
            }
            for field in ("peak_memory_bytes", "peak_device_bytes"):
                if any(found := [answer.get(field) or 0 for answer in later]):
                    row[field] = max(found)
            if tokens := [answer["tokens"] for answer in later if "tokens" in answer]:
                row["tokens"] = tokens
                row["tokens_per_second"] = float(np.median(np.divide(tokens, seconds)))
                work = work_of(shape, config, precision, float(np.mean(tokens)))
                if phase in work and peaks[precision]:
                    row |= shares(work[phase], row["seconds"]["median"], peaks[precision])
            rows.append(row)
    return rows, peaks


def _phases(answers: Mapping[str, Mapping[int, Mapping]]) -> dict[str, dict[int, dict]]:
    """Phases, with phases that are parts or differences of other phases."""
    found: dict[str, dict[int, dict]] = {phase: dict(timed) for phase, timed in answers.items() if phase != "drawing"}
    for phase, timed in answers.items():
        for number, answer in timed.items():
            inside = dict(answer.get("inside", {}))
            if "rest" in answer:
                inside[answer["rest"]] = answer["seconds"] - sum(inside.values())
            if phase == "drawing":
                cost = inside.pop("with_logprobs") - inside.pop("without_logprobs")
                inside["behavior_logprobs"] = cost
            for part, seconds in inside.items():
                counted = {"tokens": answer["tokens"]} if part in ("generate", "update") and "tokens" in answer else {}
                found.setdefault(part, {})[number] = {"seconds": seconds, **counted}
    for number, answer in found.get("generate", {}).items():
        if number in found.get("prefill", {}):
            rest = answer["seconds"] - found["prefill"][number]["seconds"]
            found.setdefault("decode", {})[number] = answer | {"seconds": rest}
    return found


def _peaks(about: Mapping, measured: Mapping, precision: str) -> dict:
    """The device's data sheet in bfloat16, or the best that any system of the precision measured."""
    devices = {about[label]["notes"].get("device") for label in about} & PEAKS.keys()
    if devices and precision == "bfloat16":
        device = devices.pop()
        return PEAKS[device] | {"from": f"data sheet of {device}"}
    found = [peak for label, peak in measured.items() if named(label)[1] == precision]
    if not found:
        return {}
    best = {field: max(peak[field] for peak in found) for field in ("flops", "bytes")}
    return best | {"from": "measured in this run: 2048³ matrix product, copy of 512 MiB; the best of all systems"}
