// Keeps a page as new as the course: parts by server-sent events, ages, sorting, narrowing, the log.
"use strict";

const $ = (id) => document.getElementById(id);

// Ages: the server gives the moment, so a part changes only when the fact does.
function span(s) {
  if (s < 60) return `${Math.max(0, Math.round(s))} s`;
  const m = Math.round(s / 60);
  if (m < 60) return `${m} min`;
  const h = Math.floor(m / 60);
  if (h < 36) return m % 60 ? `${h} h ${m % 60} min` : `${h} h`;
  return `${Math.round(h / 24)} d`;
}
function ages(root) {
  const now = Date.now() / 1000;
  for (const one of root.querySelectorAll("time[data-at]")) {
    if (!one.title) one.title = one.textContent;
    const left = Number(one.dataset.at) - now;
    const text = left > 0 ? `in ${span(left)}` : `${span(-left)} ago`;
    if (one.textContent !== text) one.textContent = text;
  }
}

// Narrowing and sorting: both are kept while the tab lives, and hold after each change.
const board = $("board");
const place = location.pathname;
const kept = {
  get mark() { return sessionStorage.getItem(`mark ${place}`) || ""; },
  set mark(value) { sessionStorage.setItem(`mark ${place}`, value); },
  get by() { return sessionStorage.getItem(`by ${place}`) || ""; },
  set by(value) { sessionStorage.setItem(`by ${place}`, value); },
};
const original = board ? [...board.tBodies[0].rows].map((row) => row.id) : [];
function narrow() {
  if (!board) return;
  const words = ($("find")?.value || "").toLowerCase();
  let shown = 0;
  for (const row of board.tBodies[0].rows) {
    const marked = !kept.mark || row.dataset.marks.split(" ").includes(kept.mark);
    const text = `${row.dataset.name} ${row.dataset.about}`.toLowerCase();
    row.hidden = !(marked && text.includes(words));
    shown += row.hidden ? 0 : 1;
  }
  for (const one of document.querySelectorAll("button[aria-pressed]"))
    one.setAttribute("aria-pressed", String(one.dataset.mark === kept.mark));
  $("none").hidden = shown > 0;
}
function sort() {
  if (!board) return;
  const [by, dir] = kept.by.split(" ");
  for (const one of board.tHead.querySelectorAll("button")) {
    if (one.dataset.by === by) one.dataset.dir = dir; else delete one.dataset.dir;
    one.closest("th").ariaSort = one.dataset.by !== by ? null : dir === "up" ? "ascending" : "descending";
  }
  const body = board.tBodies[0];
  const rows = [...body.rows];
  const place = new Map(original.map((id, n) => [id, n]));
  const first = (a, b) => (place.get(a.id) ?? 1e9) - (place.get(b.id) ?? 1e9);
  const order = (a, b) => {
    if (!by) return first(a, b);
    const [x, y] = [a.dataset[by], b.dataset[by]];
    const numbers = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
    const found = numbers ? Number(x) - Number(y) : x.localeCompare(y);
    return (dir === "down" ? -found : found) || first(a, b);
  };
  const wanted = [...rows].sort(order);
  if (wanted.some((row, n) => row !== rows[n])) {
    const focused = document.activeElement;
    body.append(...wanted);
    if (focused && body.contains(focused)) focused.focus({ preventScroll: true });
  }
}
document.addEventListener("click", (event) => {
  const one = event.target.closest("button");
  if (!one) return;
  if (one.dataset.mark !== undefined) {
    kept.mark = one.dataset.mark;
    if (!kept.mark && $("find")) $("find").value = "";
    narrow();
  } else if (one.dataset.by) {
    const [by, dir] = kept.by.split(" ");
    const begin = one.dataset.down === undefined ? "up" : "down";
    const other = begin === "up" ? "down" : "up";
    if (by !== one.dataset.by) kept.by = `${one.dataset.by} ${begin}`;
    else kept.by = dir === begin ? `${by} ${other}` : "";
    sort();
  }
});
$("find")?.addEventListener("input", narrow);

// Whether two stand for the same thing; a button's figure may have changed meanwhile.
function same(one, other) {
  if (one.dataset.mark !== undefined) return one.dataset.mark === other.dataset.mark;
  return one.getAttribute("href") === other.getAttribute("href") && one.textContent === other.textContent;
}

// Parts: pieces of HTML that our own templates made, put in place of those with the same id.
function put(parts) {
  for (const [id, html] of Object.entries(parts)) {
    const old = $(id);
    const made = document.createElement("template");
    made.innerHTML = html.trim();
    const next = made.content.firstElementChild;
    if (!old || !next) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const again = focused && [...next.querySelectorAll("a, button")].find((one) => same(one, focused));
    ages(next);
    old.replaceWith(next);
    if (again) again.focus({ preventScroll: true });
  }
  sort();
  narrow();
}
function live(text, lost) {
  const one = $("live");
  if (!one || one.textContent === text) return;
  one.textContent = text;
  one.classList.toggle("lost", lost);
}
// Another keeper, or twelve hours: it does answer, but knows this browser no more.
async function whyRefused() {
  const own = document.querySelector("script[src]").src;
  const answer = await fetch(own, { cache: "no-store" }).catch(() => null);
  if (answer?.status === 403) live("not live: this browser is let in no more; open the keeper's next URL", true);
}
function follow(url) {
  // The version stands in the address: what changed since this page was made comes first.
  let version = document.body.dataset.version;
  let source;
  let heard = Date.now();
  const open = () => {
    source?.close();
    source = new EventSource(`${url}${url.includes("?") ? "&" : "?"}since=${encodeURIComponent(version)}`);
    source.onopen = () => { heard = Date.now(); live("live", false); };
    source.onmessage = (event) => {
      heard = Date.now();
      const body = JSON.parse(event.data);
      if (body.reload) { source.close(); location.reload(); return; }
      version = event.lastEventId;
      document.body.dataset.version = version;
      put(body.parts);
    };
    source.addEventListener("beat", () => { heard = Date.now(); });
    source.onerror = () => {
      live("not live: the keeper does not answer", true);
      if (source.readyState !== EventSource.CLOSED) return;
      // A refused stream is not tried again by the browser itself.
      setTimeout(open, 5000);
      whyRefused();
    };
  };
  open();
  whileSeen(open, () => source.close());
  // After a sleep the socket may be dead without anybody saying so.
  setInterval(() => { if (!document.hidden && Date.now() - heard > 60000) { heard = Date.now(); open(); } }, 10000);
}
// A browser holds six connections to one place: a page that nobody sees gives its own back.
function whileSeen(open, close) {
  let hidden;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(() => { hidden = 0; close(); }, 5000);
    else if (hidden === 0) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
}

// The log: text only, whatever is in it. A carriage return begins its line anew, as a terminal does.
const MOST = 400000;
const STEERING = /\x1b\[[0-9;?]*[ -\/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]/g;
const ODD = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
function plain(line) {
  const clean = line.replace(STEERING, "").replace(/\r+$/, "");
  return clean.slice(clean.lastIndexOf("\r") + 1).replace(ODD, "\ufffd");
}
function logInto(pre) {
  const state = $("log-state");
  const done = document.createTextNode("");
  const last = document.createTextNode("");
  pre.append(done, last);
  let rest = "";
  let source;
  let over = false;
  const stick = () => { if ($("stick").checked) pre.scrollTop = pre.scrollHeight; };
  const took = (event) => {
    const body = JSON.parse(event.data);
    if (body.text) state.textContent = "";
    const left = "[what came before is left out]\n";
    if (body.begin) { done.data = body.begin === "cut" ? left : ""; rest = ""; }
    const lines = (rest + body.text).split("\n");
    rest = lines.pop().slice(-20000);
    if (lines.length) done.appendData(lines.map(plain).join("\n") + "\n");
    last.data = plain(rest);
    if (done.length > MOST) done.data = left + done.data.slice(done.data.indexOf("\n", done.length - MOST / 2) + 1);
    stick();
  };
  const open = () => {
    if (over) return;
    source?.close();
    source = new EventSource(pre.dataset.log);
    state.textContent = "reading";
    source.onmessage = took;
    source.addEventListener("told", (event) => { state.textContent = JSON.parse(event.data).text; });
    source.addEventListener("end", (event) => { over = true; state.textContent = JSON.parse(event.data).text; source.close(); });
    source.onerror = () => { state.textContent = "the keeper does not answer"; };
  };
  open();
  whileSeen(open, () => source.close());
  $("stick").addEventListener("change", stick);
}

ages(document);
setInterval(() => ages(document), 10000);
sort();
narrow();
if (document.body.dataset.stream) follow(document.body.dataset.stream);
if ($("log")) logInto($("log"));
