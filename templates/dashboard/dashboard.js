// What htmx cannot do: ages, finding in a list, and saying whether a page is live.
"use strict";

const $ = (id) => document.getElementById(id);
const on = (name, act) => document.addEventListener(name, act);

// Ages: the server gives the moment, so a part changes only when the fact does.
function span(s) {
  if (s < 60) return `${Math.max(0, Math.round(s))} s`;
  const m = Math.round(s / 60);
  if (m < 60) return `${m} min`;
  const h = Math.floor(m / 60);
  if (h < 36) return m % 60 ? `${h} h ${m % 60} min` : `${h} h`;
  return `${Math.round(h / 24)} d`;
}
function showAges(root) {
  for (const time of root.querySelectorAll("time[data-at]")) {
    time.title ||= time.textContent;
    const left = Number(time.dataset.at) - Date.now() / 1000;
    const text = left > 0 ? `in ${span(left)}` : `${span(-left)} ago`;
    if (time.textContent !== text) time.textContent = text;
  }
}
on("htmx:oobBeforeSwap", ({ detail }) => showAges(detail.fragment));
on("htmx:afterSwap", ({ target }) => { if (target.id === "page") showAges(target); });
setInterval(() => showAges(document), 10000);
showAges(document);

// Finding is done by a rule of style, which holds for rows that come later too. What somebody
// looks for is a name, and stays out of every address.
const rule = new CSSStyleSheet();
document.adoptedStyleSheets = [rule];
function find(words) {
  const row = `tbody tr[data-find*="${CSS.escape(words.toLowerCase())}"]`;
  rule.replaceSync(words && `#board tbody tr:not(${row}) { display: none }
    #board:not(:has(${row})) + .none { display: block }`);
}
on("input", ({ target }) => { if (target.id === "find") find(target.value); });
on("click", ({ target }) => {
  if (target.closest("[data-all]") && $("find")) find($("find").value = "");
  // A list that one comes back to in this tab is as it was left.
  sessionStorage.setItem(`view ${location.pathname}`, location.search);
  const link = target.closest("nav a, .back a");
  if (link) link.search = sessionStorage.getItem(`view ${link.pathname}`) || "";
});
if ($("find")) find($("find").value);

// Live or not, and why. A page that was away, or hears nothing, is loaded anew by htmx.
const sources = new Set();
let heardAt = Date.now();
let hiding = 0;
function say(text, lost) {
  $("live").textContent = text;
  $("live").classList.toggle("lost", lost);
}
function hear() { heardAt = Date.now(); }
function renew() {
  hear();
  if ($("renew")) htmx.trigger("#renew", "renew");
}
function close() {
  for (const source of sources) source.close();
  sources.clear();
}
on("htmx:sseOpen", ({ target, detail }) => {
  sources.add(detail.source);
  if (target.id !== "page") return;
  detail.source.addEventListener("beat", hear);
  hear();
  say("live", false);
});
on("htmx:sseClose", ({ detail }) => sources.delete(detail.source));
on("htmx:sseError", ({ detail }) => {
  // A stream that was refused is not tried again by the browser; a page says why.
  if (detail.source.readyState === EventSource.CLOSED) renew();
  else say("not live: the keeper does not answer", true);
});
on("htmx:sendError", () => {
  say("not live: the keeper does not answer", true);
  setTimeout(renew, 5000);
});
on("htmx:responseError", ({ detail }) => say(detail.xhr.status === 403
  ? "not live: this browser is signed in no more; open the keeper's next URL"
  : "not live: the keeper cannot read the course", true));
on("htmx:sseMessage", ({ target }) => {
  hear();
  if (target.closest(".log")) followLog();
});
// A browser holds six connections to one place: a page that nobody sees gives its own back.
on("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(close, 5000);
  else if (!sources.size) renew();
});
addEventListener("pagehide", close);
addEventListener("pageshow", ({ persisted }) => { if (persisted) renew(); });
// After a sleep the socket may be dead without anybody saying so.
setInterval(() => { if (!document.hidden && Date.now() - heardAt > 60000) renew(); }, 10000);

function followLog() {
  if ($("stick").checked) $("log").scrollTop = $("log").scrollHeight;
}
on("change", ({ target }) => { if (target.id === "stick") followLog(); });
