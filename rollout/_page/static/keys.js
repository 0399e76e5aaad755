// --- light, dark, or as the system has it ------------------------------------------------------

R.theme = () => {
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
};

// --- / goes to the search ------------------------------------------------------------------------

R.searchKey = (dialogs) => document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (dialogs.some((one) => one.open)) return;
  event.preventDefault();
  const search = document.getElementById("search");
  if (search) search.focus();
});
