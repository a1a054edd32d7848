// The terminal of a student's server: xterm.js over a WebSocket of this page.
"use strict";

const box = document.getElementById("terminal");
const state = document.getElementById("terminal-state");
const again = document.getElementById("reconnect");
const help = document.getElementById("terminal-help");
const terminal = new Terminal({ cursorBlink: true, fontSize: 14, scrollback: 5000 });
const fit = new FitAddon.FitAddon();
let socket = null;

const send = (message) => {
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
};
// Says what to do where connecting again would fail. The page itself is refused for the same reason.
async function showHelp() {
  const status = await fetch(location.href).then((reply) => reply.status, () => 0);
  const needed = { 403: "signed-out", 404: "no-server", 0: "no-page" }[status];
  for (const line of help.children) line.hidden = line.dataset.when !== needed;
  help.hidden = !needed;
}
function connect() {
  const size = new URLSearchParams({ columns: terminal.cols, rows: terminal.rows });
  socket = new WebSocket(`${location.origin.replace("http", "ws")}${box.dataset.socket}?${size}`);
  socket.binaryType = "arraybuffer";
  let problem = "";
  state.textContent = "connecting";
  again.hidden = true;
  help.hidden = true;
  socket.onopen = () => { terminal.options.disableStdin = false; };
  socket.onmessage = ({ data }) => {
    if (typeof data === "string") { problem = JSON.parse(data).problem; return; }
    state.textContent = "connected";
    // The server waits when too much is not drawn yet, so that Ctrl+C still works in a flood.
    terminal.write(new Uint8Array(data), () => send({ drawn: data.byteLength }));
  };
  socket.onclose = () => {
    state.textContent = problem || "not connected";
    again.hidden = false;
    terminal.options.disableStdin = true;
    if (!problem) showHelp();
  };
}
terminal.loadAddon(fit);
terminal.open(box);
fit.fit();
terminal.onData((typed) => send({ typed }));
terminal.onResize(({ cols, rows }) => send({ size: [cols, rows] }));
addEventListener("resize", () => fit.fit());
again.addEventListener("click", () => { terminal.reset(); connect(); terminal.focus(); });
connect();
terminal.focus();
