// --- the page comes together --------------------------------------------------------------------

(() => {
  const root = document.documentElement;

  // Where storage is refused, the choice of colours lasts as long as the page.
  function remembered() {
    try { return localStorage.getItem("rollout-report-theme"); } catch { return null; }
  }
  function remember(theme) {
    try { localStorage.setItem("rollout-report-theme", theme); } catch { return; }
  }
  function paint(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  }
  const choice = document.querySelector(".theme");
  const before = remembered();
  paint(before);
  for (const input of choice.querySelectorAll("input")) {
    input.checked = input.value === (root.dataset.theme || "auto");
    input.addEventListener("change", () => { paint(input.value); remember(input.value); });
  }
  choice.hidden = false;

  R.shares = () => {
    for (const part of document.querySelectorAll(".stack [data-share]")) part.style.flexGrow = part.dataset.share;
  };
  R.shares();

  // #attempt=12-3 opens that attempt, when the page opens as well as later.
  function follow() {
    const match = /^#attempt=(\d+-\d+)$/.exec(location.hash);
    const index = match ? R.find(match[1]) : -1;
    if (index >= 0) R.open(index);
    else {
      R.close();
      if (match) R.say("There is no attempt " + match[1] + " in this run.");
    }
  }

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.getElementById("talk").open) return;
    event.preventDefault();
    const search = document.getElementById("search");
    if (search) search.focus();
  });

  function start() {
    R.table();
    R.plots();
    window.addEventListener("hashchange", follow);
    follow();
  }
  function failed(error) {
    const text = "The attempts cannot be shown: " + error.message;
    for (const id of ["charts", "table"]) document.getElementById(id).replaceChildren(R.el("p", { class: "notices" }, text));
    R.say(text);
  }
  R.load().then(start).catch(failed).finally(() => { root.dataset.ready = "true"; });
})();
