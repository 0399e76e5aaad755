// --- the page comes together --------------------------------------------------------------------

(() => {
  const root = document.documentElement;
  R.theme();

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

  R.searchKey([document.getElementById("talk")]);

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
