"""The page of a run: what it does now, or what its files say, in a browser.

`sources` (what is shown: `Live`, `Recorded`), made by `study` and `charts` of what `dure.trace` has
read; `access` (who may see it); `server`; `__main__` (the process of a run's page); `static`
(the page itself, and uPlot, a chart library under the MIT licence, whole and unchanged).

The server needs starlette and uvicorn, which `pip install dure[page]` brings.

Internal: programs start it with `dure run --page`.
"""
