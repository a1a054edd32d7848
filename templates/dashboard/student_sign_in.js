// Fills the form from a join file, which stays on this machine except for the two values.
"use strict";

const field = (id) => document.getElementById(id);

field("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  let join = null;
  try {
    if (file && file.size < 65536) join = JSON.parse(await file.text()).join;
  } catch {
    join = null;
  }
  const isJoin = typeof join?.student === "string" && typeof join?.code === "string";
  field("file-problem").hidden = isJoin || !file;
  if (!isJoin) return;
  field("student").value = join.student;
  field("code").value = join.code;
  target.form.requestSubmit();
});
