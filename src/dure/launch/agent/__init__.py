"""Agents: one `dure run` on each host, which together start, stop and restart a job's rounds."""
