"""GPUs: whether the driver, torch and the cards belong together."""

from __future__ import annotations

import csv
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any  # Any: what the ranks tell as JSON

from dure.cli.doctor.finding import Finding, fine, problem, warning

__all__ = ["Gpu", "Gpus", "judge", "read"]

_QUERY = "index,name,driver_version,memory.total,memory.used,compute_mode"
_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card as nvidia-smi shows it; memory in MiB."""

    index: int
    name: str
    driver: str
    total_mib: int
    used_mib: int
    mode: str = "Default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`error` says why nvidia-smi failed, where it is installed."""

    installed: bool
    cards: tuple[Gpu, ...] = ()
    error: str = ""


def read() -> Gpus:
    """Ask nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return Gpus(installed=False)
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(installed=True, error=str(error))
    if done.returncode != 0:
        return Gpus(installed=True, error=(done.stdout + done.stderr).strip())
    return Gpus(installed=True, cards=_parse(done.stdout))


def _parse(text: str) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 6:
            index, name, driver, total, used, mode = row
            memory = [int(n) if n.isdigit() else 0 for n in (total, used)]
            found.append(
                Gpu(
                    index=int(index),
                    name=name,
                    driver=driver,
                    total_mib=memory[0],
                    used_mib=memory[1],
                    mode=mode,
                )
            )
    return tuple(found)


def judge(gpus: Gpus, torch: dict[str, Any], usual: tuple[str, ...] = ()) -> list[Finding]:
    """Compare what the driver shows with what torch sees.

    Args:
        gpus: The driver's view.
        torch: What a rank told: `torch`, `cuda`, `gpus`, `apart`; empty if none did.
        usual: What CUDA_VISIBLE_DEVICES names, if it is set.
    """
    if gpus.error:
        return [
            problem(
                "GPUs",
                f"nvidia-smi fails: {gpus.error}",
                "The driver is not loaded or was upgraded under a running kernel: reboot, or "
                "start the container with --gpus all.",
            )
        ]
    seen: list[str] = torch.get("gpus", [])
    if not gpus.cards:
        return [fine("GPUs", f"torch sees {len(seen)}" if seen else "none; CPU only")]
    found = [_judge_torch(gpus, torch, seen, usual)] if torch else []
    for card in gpus.cards:
        found.append(_judge_card(card))
    if torch.get("apart"):
        pairs = ", ".join(f"{i} to {j}" for i, j in torch["apart"][:6])
        found.append(
            warning(
                "GPU peers",
                f"no direct access from {pairs}: copies go through the host",
                "Use cards on one switch; in a virtual machine ask for peer access.",
            )
        )
    return found


def _judge_torch(
    gpus: Gpus, torch: dict[str, Any], seen: list[str], usual: tuple[str, ...]
) -> Finding:
    number = len(gpus.cards)
    if torch.get("cuda") is None:
        return warning(
            "GPUs",
            f"{number} cards, but torch {torch['torch']} was built without CUDA",
            "pip install torch (not a +cpu build), unless CPU is what you want.",
        )
    if not seen:
        return problem(
            "GPUs",
            f"{number} cards, but torch {torch['torch']} (CUDA {torch['cuda']}) can use none; "
            f"the driver is {gpus.cards[0].driver}",
            "The driver is older than this CUDA: upgrade it, or install a torch for an older CUDA; "
            "or unset CUDA_VISIBLE_DEVICES.",
        )
    text = f"torch (CUDA {torch['cuda']}) sees {len(seen)} of {number}"
    if len(seen) < number and not usual:
        return warning("GPUs", text, "See CUDA_VISIBLE_DEVICES, and nvidia-smi for broken cards.")
    return fine("GPUs", text)


def _judge_card(card: Gpu) -> Finding:
    name = f"GPU {card.index}"
    text = f"{card.name}, {card.total_mib - card.used_mib} of {card.total_mib} MiB free"
    if "Prohibited" in card.mode or "Exclusive" in card.mode:
        return warning(name, f"{text}, mode {card.mode}", "nvidia-smi -c DEFAULT, to share it.")
    if card.used_mib > 0.5 * card.total_mib:
        return warning(name, f"{text}: somebody uses it", "`nvidia-smi` lists the processes.")
    return fine(name, text)
