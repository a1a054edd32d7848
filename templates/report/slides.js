"use strict";
const slides = [...document.querySelectorAll(".slide")];
const counter = document.querySelector(".counter");
let place = 0;

function fit(slide) {
  const body = slide.querySelector(".body");
  body.style.zoom = 1;
  const room = slide.clientHeight - (body.offsetTop - slide.offsetTop) - 56;
  for (let zoom = 1; body.scrollHeight * zoom > room && zoom > 0.4; zoom -= 0.04) {
    body.style.zoom = zoom;
    if (body.getBoundingClientRect().bottom <= innerHeight - 40) break;
  }
}

function show(number) {
  place = Math.max(0, Math.min(slides.length - 1, number));
  slides.forEach((slide, index) => { slide.hidden = index !== place; });
  counter.textContent = `${place + 1} / ${slides.length}`;
  fit(slides[place]);
  scrollTo(0, 0);
  history.replaceState(null, "", `#${place + 1}`);
}

const steps = {
  ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, Enter: 1, n: 1,
  ArrowLeft: -1, ArrowUp: -1, PageUp: -1, Backspace: -1, p: -1,
  Home: -Infinity, End: Infinity,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "f" && document.documentElement.requestFullscreen) {
    document.documentElement.requestFullscreen();
    return;
  }
  const step = event.key === " " && event.shiftKey ? -1 : steps[event.key];
  if (step === undefined || event.target.closest("a")) return;
  event.preventDefault();
  show(place + step);
});
document.querySelector(".previous").addEventListener("click", () => show(place - 1));
document.querySelector(".next").addEventListener("click", () => show(place + 1));
addEventListener("hashchange", () => show(Number(location.hash.slice(1)) - 1 || 0));
addEventListener("resize", () => fit(slides[place]));
addEventListener("beforeprint", () => {
  slides.forEach((slide) => { slide.hidden = false; slide.querySelector(".body").style.zoom = 1; });
});
addEventListener("afterprint", () => show(place));
document.documentElement.classList.add("deck");
show(Number(location.hash.slice(1)) - 1 || 0);
