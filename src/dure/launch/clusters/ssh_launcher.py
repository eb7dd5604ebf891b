"""The ssh launcher of a job on several hosts: it starts agents, and shows what they write.

One ssh per host runs an agent there, all at once; a host that is this machine gets its agent
without ssh. The ssh launcher itself takes no part in the job: it sends the key, passes signals on,
writes the agents' lines as they come (each has its host and rank in front already), and exits with
the code of the first host that failed. Agents agree among themselves on what a dead rank means. It
steps in where they cannot: it names a host that cannot be reached, and ends the others.

One task per agent and per stream, on one thread. No write blocks, so that signals pass while the
reader of the output has stopped. When the ssh launcher dies, for whatever reason, its ends of the
agents' standard inputs close, and the agents end (`dure.launch.clusters.control_stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque

from dure.launch.clusters.commands import HostsJob, first_lines, host_command
from dure.launch.clusters.control_stream import SSH_FAILED, code_by_ssh
from dure.launch.clusters.meeting import is_this_host
from dure.launch.show.output import IDLE_S, LineReader, Sink, same_file
from dure.launch.spec import Stream
from dure.store.silence import silence_s

__all__ = ["run_on_hosts"]

_PROBES = 6
"""How often ssh asks a silent host for a sign of life before it gives up."""

_CHUNK = 1 << 16
_REST_S = 0.5  # for output that another process than ssh holds open (its ControlMaster)
_LAST_S = 0.3  # for the reader of an interrupted job's output
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_on_hosts(job: HostsJob, key: bytes) -> int:
    """Run a job on its hosts; return the exit code of the first that failed, or 0.

    Raises:
        UsageError: A variable cannot be passed on.

    Threads:
        On the main thread, because signals are handled there.
    """
    return asyncio.run(_SshLauncher(job).run(first_lines(job, key)))


def _words(job: HostsJob, number: int) -> list[str]:
    """Return the command that starts a host's agent.

    Of two options of ssh that contradict each other, the first counts.
    """
    command = host_command(job, number)
    host = job.hosts[number].host
    if is_this_host(host):
        return ["/bin/sh", "-c", command]
    interval_s = max(1, silence_s() // _PROBES)
    count = math.ceil(silence_s() / interval_s)
    probes = [f"-oServerAliveInterval={interval_s}", f"-oServerAliveCountMax={count}"]
    return ["ssh", *job.ssh_options, "-T", "-oConnectTimeout=10", *probes, "--", host, command]


class _SshLauncher:
    """The hosts of a job while it runs."""

    def __init__(self, job: HostsJob) -> None:
        self._job = job
        out = Sink(1)
        errors = out if same_file(1, 2) else Sink(2)
        self._sinks: dict[Stream, Sink] = {"stdout": out, "stderr": errors}
        self._running: dict[str, Process] = {}
        self._interrupted_by: int | None = None
        self._first_code = 0
        self._asked = False
        self._cut = asyncio.Event()  # the agents had their time to end

    async def run(self, lines: bytes) -> int:
        """Start all agents with the first lines of their standard input, and follow them."""
        loop = asyncio.get_running_loop()
        for number in (*_ENDS, *_WARNINGS):
            loop.add_signal_handler(number, self._signaled, number)
        agents = [
            asyncio.create_task(self._follow(number, lines))
            for number in range(len(self._job.hosts))
        ]
        done = asyncio.gather(*agents)
        cut = asyncio.create_task(self._cut.wait())
        await asyncio.wait([done, cut], return_when=asyncio.FIRST_COMPLETED)
        for agent in self._running.values():  # only if they were cut off
            assert agent.stdin is not None
            agent.stdin.close()
            agent.terminate()
        await done
        cut.cancel()
        await self._finish()
        return self._first_code if self._interrupted_by is None else 128 + self._interrupted_by

    async def _follow(self, number: int, lines: bytes) -> None:
        """Run one host's agent to its end."""
        host = self._job.hosts[number].host
        agent = await asyncio.create_subprocess_exec(
            *_words(self._job, number), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        self._running[host] = agent
        agent.stdin.write(lines)
        if self._asked:
            self._send(agent, signal.SIGTERM)
        last: deque[str] = deque(maxlen=4)  # lines of standard error, for ssh may say why it failed
        outputs = [
            asyncio.create_task(self._pass_on(agent.stdout, "stdout", deque(maxlen=0))),
            asyncio.create_task(self._pass_on(agent.stderr, "stderr", last)),
        ]
        status = await agent.wait()
        await asyncio.wait(outputs, timeout=_REST_S)
        for output in outputs:
            output.cancel()
        del self._running[host]
        words = [line.strip() for line in last if line.strip()]
        self._ended(host, status, " / ".join(word for word in words if word[0] != "["))

    async def _pass_on(self, pipe: asyncio.StreamReader, stream: Stream, last: deque[str]) -> None:
        """Write an agent's lines, and its unfinished lines when nothing comes for a while."""
        reader, sink = LineReader(0, stream), self._sinks[stream]
        data = b"-"
        while data:
            try:
                data = await asyncio.wait_for(pipe.read(_CHUNK), IDLE_S if reader.holds else None)
            except TimeoutError:
                sink.put_part(reader, b"", reader.flush())
            else:
                lines = reader.feed(data, 0.0)
                last.extend(line.decode(errors="replace") for line in lines)
                if not (self._asked and sink.full):
                    sink.put(reader, b"", lines)
            if (not data or reader.overfull) and reader.holds:
                sink.put_part(reader, b"", reader.flush())
            await self._write(sink)

    async def _write(self, sink: Sink) -> None:
        """Write what the sink has; wait only if it is full, as the ranks then must, too."""
        sink.write_some()
        if sink.trouble is not None and self._interrupted_by is None:
            self._interrupted_by = signal.SIGPIPE
            self._ask_all(signal.SIGTERM)
        while sink.full and not self._asked:  # an agent that ends has its pipes read to their end
            await self._write_more(sink)

    async def _write_more(self, sink: Sink) -> None:
        """Wait a moment for the sink's reader to take more, and write that."""
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        loop.add_writer(sink.fd, room.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(room.wait(), _LAST_S)
        loop.remove_writer(sink.fd)
        sink.write_some()

    def _ended(self, host: str, status: int, words: str) -> None:
        """Note how an agent has ended; `words` are the last of its lines that no agent wrote."""
        if status == 0 or self._first_code:
            return
        self._first_code = code_by_ssh(status) if status > 0 else 128 - status
        if self._interrupted_by is not None:
            return
        trouble = self._trouble(host, status, words)
        if trouble:
            self._print(trouble)
            self._ask_all(signal.SIGTERM)
        else:
            asyncio.get_running_loop().call_later(self._job.follow_s, self._end_others)

    def _trouble(self, host: str, status: int, words: str) -> str:
        """Return what kept an agent from its work, if that was not the failure of a rank."""
        if status < 0:
            killed = "`dure run` on" if is_this_host(host) else "ssh to"
            return f"{killed} host {host} was killed by {signal.Signals(-status).name}"
        if status == SSH_FAILED and not is_this_host(host):
            said = words or "ssh ended without a word, as when `dure run` there is killed"
            return f"host {host} cannot be reached, or was lost: {said}"
        by_shell = status in (2, 126, 127) and "/bin/sh:" in words
        if by_shell or "No module named 'dure'" in words:
            command = f"{self._job.python} -m dure.cli in {self._job.directory}"
            return f"host {host} cannot start {command} (see --remote-python): {words}"
        return ""

    def _signaled(self, number: int) -> None:
        if number in _WARNINGS:  # for the ranks
            for agent in self._running.values():
                self._send(agent, number)
            return
        self._interrupted_by = self._interrupted_by or number
        self._ask_all(number)

    def _end_others(self) -> None:
        if self._running and not self._asked:
            self._print(f"ending the hosts that still run: {', '.join(sorted(self._running))}")
            self._ask_all(signal.SIGTERM)

    def _ask_all(self, number: int) -> None:
        """Ask every agent that runs to end; the time to do so begins with the first request."""
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_later(self._job.end_s, self._cut.set)
        for agent in self._running.values():
            self._send(agent, number)

    def _send(self, agent: Process, number: int) -> None:
        assert agent.stdin is not None
        agent.stdin.write(f"{signal.Signals(number).name}\n".encode())

    def _print(self, text: str) -> None:
        self._sinks["stderr"].say(f"[dure] {text}")
        self._sinks["stderr"].write_some()

    async def _finish(self) -> None:
        """Write what is left; after an interruption, do not wait long for the reader."""
        for sink in self._sinks.values():
            sink.finish()
            sink.write_some()
            while sink.waiting:
                await self._write_more(sink)
                if self._interrupted_by is not None:
                    break
