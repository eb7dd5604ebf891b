"""The page of a run in a browser: its present state, or the contents of its files.

`sources` (the content: `Live`, `Recorded`), made by `study` and `charts` from files that
`dure.trace` has read; `access` (authorization); `server`; `__main__` (the process of a run's
page); `static` (the page itself, and uPlot, a chart library under the MIT licence, unchanged).

The server needs starlette and uvicorn, which the extra `page` brings.

Internal: programs start it with `dure run --page`.
"""
