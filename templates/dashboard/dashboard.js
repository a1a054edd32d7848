// Features that htmx lacks: ages, a filter for lists, and whether a page is live.
"use strict";

const $ = (id) => document.getElementById(id);
const on = (name, act) => document.addEventListener(name, act);

// Ages: the server sends the time itself, so that a part changes only with its facts.
function span(s) {
  if (s < 120) return `${Math.max(0, Math.round(s))} s`;
  const m = Math.round(s / 60);
  if (m < 60) return `${m} min`;
  const h = Math.floor(m / 60);
  if (h < 48) return m % 60 ? `${h} h ${m % 60} min` : `${h} h`;
  return h % 24 ? `${Math.floor(h / 24)} d ${h % 24} h` : `${h / 24} d`;
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

// The filter is a style rule, so that it applies to later rows too. The search text is a name and
// must not appear in an address.
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
  // Restore the view of a list when somebody returns to it in this tab.
  sessionStorage.setItem(`view ${location.pathname}`, location.search);
  const link = target.closest("nav a, .back a");
  if (link) link.search = sessionStorage.getItem(`view ${link.pathname}`) || "";
});
if ($("find")) find($("find").value);

// A second click while a question is being answered sends nothing.
on("submit", (event) => {
  const form = event.target;
  if (!form.matches("form.confirm")) return;
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "yes";
});
addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
});

// The tab keeps what was typed, also if the session ends before it is sent. `data-draft` names what
// it is for: the next request has another name.
for (const area of document.querySelectorAll("textarea[data-draft]")) {
  const key = `draft ${area.dataset.draft}`;
  area.value ||= sessionStorage.getItem(key) || "";
  area.addEventListener("input", () => sessionStorage.setItem(key, area.value));
}

// Whether the page is live, and if not, why. htmx reloads a page that was hidden or lost its stream.
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
  // The browser does not retry a refused stream; reloading the page shows the reason.
  if (detail.source.readyState === EventSource.CLOSED) renew();
  else say("not live: the keeper does not answer", true);
});
on("htmx:sendError", () => {
  say("not live: the keeper does not answer", true);
  setTimeout(renew, 5000);
});
on("htmx:responseError", ({ detail }) => say(detail.xhr.status === 403
  ? document.body.dataset.signedOut
  : "not live: the keeper cannot read the course", true));
on("htmx:sseMessage", ({ target }) => {
  hear();
  if (target.closest(".log")) followLog();
});
// A browser opens at most six connections to one host, so a hidden page closes its own.
on("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(close, 5000);
  else if (!sources.size) renew();
});
addEventListener("pagehide", close);
addEventListener("pageshow", ({ persisted }) => { if (persisted) renew(); });
// After the machine slept, the socket may be dead without an error.
setInterval(() => { if (!document.hidden && Date.now() - heardAt > 60000) renew(); }, 10000);

function followLog() {
  if ($("stick").checked) $("log").scrollTop = $("log").scrollHeight;
}
on("change", ({ target }) => { if (target.id === "stick") followLog(); });
