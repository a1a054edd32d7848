// The page for marking: its keys, the line of a comment, and what was typed and not saved.
"use strict";

const isField = (node) => node.matches("textarea, select, input:not([type=checkbox])");

// Keys are those that the elements name in aria-keyshortcuts: a field gets the focus, others a click.
function press(name) {
  const target = document.querySelector(`[aria-keyshortcuts~="${CSS.escape(name)}"]`);
  if (!target) return false;
  if (!isField(target)) target.click();
  else { target.focus(); if (target.select) target.select(); }
  return true;
}
on("keydown", (event) => {
  const { key, target } = event;
  if ($("keys").open) return;
  if (key === "Enter" && (event.ctrlKey || event.metaKey) && target.form) {
    event.preventDefault();
    target.form.requestSubmit();
    return;
  }
  if (isField(target)) {
    if (key === "Escape") target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (!$("single-keys").checked) return;
  if (key === "w" && document.querySelector(".sheet")) document.querySelector(".sheet").focus();
  else if (!press(/^[A-Z]$/.test(key) ? `Shift+${key.toLowerCase()}` : key)) return;
  event.preventDefault();
});
on("click", ({ target }) => { if (target.closest("#show-keys")) $("keys").showModal(); });
$("single-keys").checked = localStorage.getItem("single keys") !== "off";
$("single-keys").addEventListener("change", ({ target }) =>
  localStorage.setItem("single keys", target.checked ? "on" : "off"));

// The line that a comment is on: a click on its number, or the field.
function showLine(number, focus) {
  document.querySelector(".sheet .on")?.classList.remove("on");
  const line = number && $(`l${number}`);
  if (!line) return;
  line.classList.add("on");
  if (!focus) line.scrollIntoView({ block: "nearest" });
}
on("input", ({ target }) => {
  if (target.id === "line") showLine(target.value);
  if (target.id.startsWith("points-")) showTotal();
});
on("click", ({ target }) => {
  const number = target.dataset.line;
  if (!number || !$("line")) return;
  $("line").value = number;
  showLine(number, true);
  $("comment-text").focus();
});

// A saved comment is added to what was typed; another choice takes its place.
let typed = "";
on("focusin", ({ target }) => { if (target.dataset.into) typed = $(target.dataset.into).value; });
on("change", ({ target }) => {
  if (!target.dataset.into) return;
  $(target.dataset.into).value = [typed, target.value].filter(Boolean).join("\n");
});

// The total as it would be with what was typed.
function showTotal() {
  const { automatic, off } = $("total").dataset;
  const fields = [...document.querySelectorAll("[id^=points-]")];
  const sum = fields.reduce((all, field) => all + (Number(field.value.replace(",", ".")) || 0), 0);
  const round = (value) => String(Math.round(value * 1000) / 1000);
  document.querySelector("[data-sum]").textContent = round(sum);
  document.querySelector("[data-total]").textContent =
    round(Math.max(0, Number(automatic) + sum - Number(off)));
}

// What was typed stays: when another file is opened, and until somebody confirms to leave.
let leaving = false;
const isTyped = (field) => field.value !== field.dataset.shown;
addEventListener("beforeunload", (event) => {
  const kept = "#comment-text, .answer [data-shown]";
  const fields = leaving ? kept : `${kept}, #rubric [data-shown]`;
  if ([...document.querySelectorAll(fields)].some(isTyped)) event.preventDefault();
});
on("htmx:beforeOnLoad", ({ detail }) => {
  if (detail.xhr.getResponseHeader("HX-Redirect")) leaving = true;
});
// Whether the dashboard got it: a message, as the keys work far below the page's head.
const showSent = (isSent) => {
  $("sending").hidden = isSent;
  if (isSent) say("", false);
};
on("htmx:sendError", () => showSent(false));
on("htmx:beforeOnLoad", () => showSent(true));
let draft = "";
let isLeft = false; // what was sent and had the focus
on("htmx:beforeSwap", ({ detail }) => {
  const hasFocus = detail.target.contains(document.activeElement);
  isLeft = hasFocus && detail.requestConfig.verb !== "get" && detail.xhr.status === 200;
  if (detail.target.id !== "work") return;
  draft = detail.requestConfig.verb === "get" ? $("comment-text")?.value : "";
});
on("htmx:afterSwap", ({ target }) => {
  if (target.id === "work" && draft && $("comment-text")) $("comment-text").value = draft;
  if (target.id === "work") showWork();
  if (target.id === "marks") showTotal();
  if (isLeft) leaveFields(target);
  showAges(document);
});
// What was sent needs no more text: the next single key is a key. htmx gives the focus back to the
// field, and a button that removed itself leaves it nowhere.
function leaveFields(part) {
  const active = document.activeElement;
  if (active !== document.body && !(part.contains(active) && isField(active))) return;
  part.querySelector(".sheet, #save")?.focus({ preventScroll: true });
}
// What matters comes into view: the file in its list, the end of a log, the line of a comment.
function showWork() {
  document.querySelector(".files [aria-current]")?.scrollIntoView({ block: "nearest" });
  const log = document.querySelector(".sheet[data-end]");
  if (log) log.scrollTop = log.scrollHeight;
  showLine($("line")?.value);
}
showWork();
