// The page: what comes as events, put into tables. Text is put into text nodes, never into markup.
"use strict";

const at = (id) => document.getElementById(id);
const curves = new Curves(at("charts"));
const shown = new Map(); // of each part of the page: the JSON that it shows
const MOST_SHOWN = 1000; // lines of output

let output = null; // the stream of a rank's lines
let over = false;

function ranksOf(numbers) {
  const runs = [];
  for (const rank of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] + 1 === rank) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const text = runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
  return `${numbers.length === 1 ? "rank" : "ranks"} ${text}`;
}

function bytes(number) {
  if (number === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; number >= 1024 && i < units.length - 1; i++) number /= 1024;
  return `${number >= 100 || i === 0 ? Math.round(number) : number.toPrecision(3)} ${units[i]}`;
}

function bandwidth(gbs) {
  return gbs >= 1 ? `${gbs.toPrecision(3)} GB/s` : gbs >= 1e-3 ? `${(gbs * 1e3).toPrecision(3)} MB/s` : `${(gbs * 1e6).toPrecision(3)} kB/s`;
}

// A place in a program: its last two names, and all of it where the mouse is.
function place(text) {
  const names = text.split("/");
  return element("code", { title: text, textContent: names.length > 2 ? names.slice(-2).join("/") : text });
}

function cell(content, className = "") {
  return element("td", { className }, typeof content === "string" ? document.createTextNode(content) : content);
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map(([text, name]) => element("th", { textContent: text, className: name || "" })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function bar(share) {
  const full = element("i");
  full.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return element("span", { className: "bar" }, full);
}

// Makes a part of the page anew if what it shows has changed.
function update(name, content, make) {
  const text = JSON.stringify(content);
  if (shown.get(name) === text) return;
  shown.set(name, text);
  make(at(name), content);
}

function showHead(view) {
  const hosts = new Set(view.ranks.map((row) => row.host)).size;
  const failed = view.ranks.filter((row) => row.state === "failed").length;
  const size = `${view.ranks.length} rank${view.ranks.length === 1 ? "" : "s"} on ${hosts} host${hosts === 1 ? "" : "s"}`;
  at("kind").textContent = view.live ? "dure run" : "dure view";
  at("title").textContent = view.title;
  document.title = `${failed ? "✗ " : ""}${view.title} · dure`;
  const state = view.outcome ? view.outcome.text : view.live ? `running for ${clock(view.elapsed_s)}` : "recorded";
  at("status").textContent = `${state} · ${size}${failed ? ` · ${failed} failed` : ""}`;
}

function showRanks(part, ranks) {
  const live = ranks.some((row) => row.memory !== null || row.quiet_s !== null);
  const heads = [["rank", "n"], ["host"], ["state"], ["step"], ["values"], ...(live ? [["memory", "n"], ["cpu", "n"], ["quiet", "n"]] : []), ["at"], ["last line"]];
  const rows = ranks.map((row) => {
    const step = row.step === null ? "–" : row.total ? `${row.step} of ${row.total}` : `${row.step}`;
    const values = Object.entries(row.values).map(([k, v]) => `${k} ${typeof v === "number" ? short(v) : v ?? "not finite"}`).join(", ");
    const more = live ? [cell(bytes(row.memory), "n"), cell(row.cpu === null ? "–" : `${Math.round(100 * row.cpu)} %`, "n"),
      cell(row.quiet_s === null ? "–" : `${Math.round(row.quiet_s)} s`, "n")] : [];
    const steps = element("span", {}, step, row.total ? bar(row.step / row.total) : null);
    return element("tr", {}, cell(`${row.rank}`, "n"), element("td", { title: `pid ${row.pid}`, textContent: row.host }),
      cell(element("span", { className: `state ${row.state}`, textContent: row.state })), cell(steps), cell(values),
      ...more, cell(row.where ? place(row.where) : "–"), element("td", { className: "clip", title: row.last, textContent: row.last }));
  });
  part.replaceChildren(element("h2", { textContent: "Ranks" }), table(heads, rows));
}

function showWaits(part, waits) {
  part.hidden = false;
  const title = element("h2", { textContent: "Who waits for whom" });
  if (!waits.length) {
    part.replaceChildren(title, element("p", { textContent: "Nobody waits for long." }));
    return;
  }
  const rows = waits.map((wait) => element("tr", {}, cell(`rank ${wait.rank}`),
    cell(wait.on.length ? element("span", { className: "late", textContent: ranksOf(wait.on) }) : "nobody: all have come"),
    cell(`${wait.since_s < 10 ? wait.since_s.toFixed(1) : Math.round(wait.since_s)} s`, "n"), cell(wait.call, "wide"), cell(place(wait.at))));
  part.replaceChildren(title, table([["who"], ["waits for"], ["since", "n"], ["in"], ["at"]], rows));
}

function showCollectives(part, found) {
  part.hidden = !found.length;
  const most = Math.max(...found.map((each) => each.gbs), 1e-9);
  const rows = found.map((each) => element("tr", {}, cell(each.op), cell(each.group), cell(`${each.ranks}`, "n"), cell(bytes(each.nbytes), "n"),
    cell(`${each.calls}`, "n"), cell(duration(each.ms), "n"), cell(duration(each.late_ms), "n"),
    element("td", { className: "n" }, bandwidth(each.gbs), bar(each.gbs / most))));
  const title = element("h2", {}, "Collectives", element("small", {}, "the last calls, by bandwidth"));
  part.replaceChildren(title, table([["operation"], ["group"], ["ranks", "n"], ["size", "n"], ["calls", "n"], ["takes", "n"], ["waits for the last", "n"], ["bandwidth", "n"]], rows));
}

function showFailure(part, failure) {
  part.hidden = !failure;
  if (!failure) return;
  const places = failure.sites.some((site) => site.where);
  const rows = failure.sites.map((site) => element("tr", {}, cell(ranksOf(site.ranks)), cell(site.call, "wide"), cell(site.at ? place(site.at) : "–"),
    cell(site.how, "wide"), places ? cell(site.where ? place(site.where) : "–") : null));
  const parts = [element("h2", { textContent: failure.headline })];
  if (failure.sentences.length) parts.push(element("ul", {}, ...failure.sentences.map((text) => element("li", { textContent: text }))));
  if (rows.length) parts.push(table([["who"], ["last operation"], ["called at"], ["how it ended"], ...(places ? [["was at"]] : [])], rows));
  if (failure.traceback) parts.push(element("details", {}, element("summary", { textContent: "Traceback" }), element("pre", { textContent: failure.traceback })));
  part.replaceChildren(...parts);
}

function showProblems(part, problems) {
  part.hidden = !problems.length;
  part.replaceChildren(element("h2", { textContent: "Left out" }), element("ul", {}, ...problems.map((text) => element("li", { textContent: text }))));
}

function showChoice(view) {
  at("output").hidden = !view.live || !view.ranks.length;
  const whose = at("whose");
  const ranks = view.ranks.map((row) => String(row.rank));
  if (ranks.join() === [...whose.options].map((option) => option.value).join()) return;
  const chosen = whose.value;
  whose.replaceChildren(...ranks.map((rank) => element("option", { value: rank, textContent: rank })));
  whose.value = ranks.includes(chosen) ? chosen : ranks[0];
  if (whose.value !== chosen && !at("output").hidden) follow();
}

// Follow the output of the chosen rank; its last lines come first.
function follow() {
  output?.close();
  const place = at("lines");
  place.replaceChildren();
  if (over) return;
  output = new EventSource(`output?rank=${encodeURIComponent(at("whose").value)}`);
  output.addEventListener("lines", (event) => {
    const low = place.scrollTop + place.clientHeight >= place.scrollHeight - 20;
    for (const [stream, text] of JSON.parse(event.data)) place.append(element("span", { className: stream === "stderr" ? "stderr" : "", textContent: `${text}\n` }));
    while (place.childElementCount > MOST_SHOWN) place.firstElementChild.remove();
    if (low) place.scrollTop = place.scrollHeight;
  });
  output.addEventListener("open", () => place.replaceChildren());
  output.addEventListener("over", () => output.close());
}

function show(view) {
  showHead(view);
  update("failure", view.failure, showFailure);
  update("ranks", view.ranks, showRanks);
  update("waits", view.waits, showWaits);
  update("timeline", view.timeline, drawTimeline);
  update("collectives", view.collectives, showCollectives);
  update("problems", view.problems, showProblems);
  showChoice(view);
}

at("whose").addEventListener("change", follow);
const events = new EventSource("events");
events.addEventListener("view", (event) => show(JSON.parse(event.data)));
events.addEventListener("curves", (event) => curves.add(JSON.parse(event.data)));
events.addEventListener("over", () => { over = true; events.close(); document.body.dataset.over = "yes"; });
events.addEventListener("error", () => { if (!over) at("status").textContent = "Nobody answers: the run may have ended. What is shown was the last."; });
