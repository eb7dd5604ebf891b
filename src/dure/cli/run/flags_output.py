"""The flags for what ranks write, and for the cores and processes they get."""

from __future__ import annotations

from pathlib import Path

from dure.cli.run.flag import Flag, Group
from dure.cli.run.values import choice, ranks, streams, words

__all__ = ["MACHINE", "OUTPUT"]


OUTPUT = (
    Flag(
        name="log_dir",
        spellings=("--log-dir",),
        group=Group.OUTPUT,
        metavar="DIR",
        parse=Path,
        means="Keep each rank's output and error in files here, by restart and rank.",
        torchrun="--log-dir",
        pet="LOG_DIR",
        differs="Without -r and -t both streams of all ranks are kept, and shown as well.",
    ),
    Flag(
        name="redirects",
        spellings=("--redirects", "-r"),
        group=Group.OUTPUT,
        metavar="STREAMS",
        parse=streams,
        default="0",
        means="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or 0:1,1:2 by rank.",
        torchrun="--redirects",
        pet="REDIRECTS",
        differs="Without --log-dir they go to a new directory, which is named.",
    ),
    Flag(
        name="tee",
        spellings=("--tee", "-t"),
        group=Group.OUTPUT,
        metavar="STREAMS",
        parse=streams,
        default="0",
        means="Streams that go to files and are shown, too.",
        torchrun="--tee",
        pet="TEE",
        differs="As --redirects.",
    ),
    Flag(
        name="filter",
        spellings=("--local-ranks-filter",),
        group=Group.OUTPUT,
        metavar="RANKS",
        parse=ranks,
        default="all",
        means="Show only what these local ranks write; files are kept of all.",
        torchrun="--local-ranks-filter",
        pet="LOCAL_RANKS_FILTER",
    ),
    Flag(
        name="stdout_filters",
        spellings=("--duplicate-stdout-filters",),
        group=Group.OUTPUT,
        metavar="WORDS",
        parse=words,
        means="Keep lines of stdout with one of these words in attempt_N/filtered_stdout.log.",
        torchrun="--duplicate-stdout-filters",
        pet="DUPLICATE_STDOUT_FILTERS",
        differs="As --redirects; lines of all ranks are looked at, not only of those with -t.",
    ),
    Flag(
        name="stderr_filters",
        spellings=("--duplicate-stderr-filters",),
        group=Group.OUTPUT,
        metavar="WORDS",
        parse=words,
        means="The same for stderr, in filtered_stderr.log.",
        torchrun="--duplicate-stderr-filters",
        pet="DUPLICATE_STDERR_FILTERS",
        differs="As the one before.",
    ),
    Flag(
        name="prefix",
        spellings=("--prefix",),
        group=Group.OUTPUT,
        metavar="auto|rank|host|none",
        parse=choice("auto", "rank", "host", "none"),
        default="auto",
        means="What stands before each line.",
    ),
    Flag(
        name="no_fold",
        spellings=("--no-fold",),
        group=Group.OUTPUT,
        means="Show lines that several ranks write alike as often as they come.",
    ),
    Flag(
        name="live",
        spellings=("--live",),
        group=Group.OUTPUT,
        means="Show the progress of all ranks in one view.",
    ),
    Flag(
        name="trace_dir",
        spellings=("--trace-dir",),
        group=Group.OUTPUT,
        metavar="DIR",
        parse=Path,
        means="Where ranks write their flight records, for `dure trace merge`.",
    ),
)

MACHINE = (
    Flag(
        name="numa",
        spellings=("--numa-binding",),
        group=Group.MACHINE,
        metavar="node|socket|exclusive|core-complex",
        parse=choice("node", "socket", "exclusive", "core-complex"),
        default="not bound",
        means="Bind each rank to cores: those near its GPU, or a fair share without GPUs.",
        torchrun="--numa-binding",
        differs="Works without GPUs, too.",
    ),
    Flag(
        name="virtual_local_rank",
        spellings=("--virtual-local-rank",),
        group=Group.MACHINE,
        means="Each rank has LOCAL_RANK 0 and sees one GPU, its own.",
        torchrun="--virtual-local-rank",
        pet="VIRTUAL_LOCAL_RANK",
    ),
    Flag(
        name="malloc_defaults",
        spellings=("--malloc-defaults",),
        group=Group.MACHINE,
        means="Leave the C library's malloc as it is: otherwise ranks keep the memory they free.",
    ),
    Flag(
        name="no_zygote",
        spellings=("--no-zygote",),
        group=Group.MACHINE,
        means="Start a fresh interpreter for each rank, instead of a copy of one with torch.",
    ),
    Flag(
        name="preload",
        spellings=("--preload",),
        group=Group.MACHINE,
        metavar="MODULES",
        parse=words,
        means="Modules to import once for all ranks, besides torch.",
    ),
)
