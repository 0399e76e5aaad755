// --- a run that goes on: rows as they come, the headline anew, the report once it is over -------

(() => {
  const line = document.getElementById("live");
  const dialog = document.getElementById("talk");
  const page = crypto.randomUUID();
  const rows = new Map();
  const ofReport = { load: R.load, entry: R.entry, scan: R.scan, prompt: R.prompt, label: R.label };
  let run = null;
  let from = 0;
  let drawn = 0;
  let pending = null;

  function tell(text, lost) {
    line.textContent = text;
    line.classList.toggle("lost", Boolean(lost));
  }

  async function ask(address) {
    const response = await fetch(address, { cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    return response.text();
  }

  // A document, since markup of this page never comes from text.
  function read(address) {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("GET", address);
      request.responseType = "document";
      request.onload = () => (request.status === 200 && request.response ? resolve(request.response) : reject(new Error("it is not there.")));
      request.onerror = () => reject(new Error("the run's server is gone."));
      request.send();
    });
  }

  async function news(wait) {
    let state;
    do {
      const [head, ...lines] = (await ask("news?page=" + page + "&from=" + from + (wait || ""))).trimEnd().split("\n");
      state = JSON.parse(head);
      if (run !== null && state.run !== run) { location.reload(); return new Promise(() => {}); }
      run = state.run;
      for (const one of lines) { const row = JSON.parse(one); rows.set(row.row + "-" + row.attempt, row); }
      from = state.next;
    } while (state.more);
    return state;
  }

  function arrange() {
    const list = [...rows.values()].sort((a, b) => a.row - b.row || a.attempt - b.attempt);
    const categories = [...new Set(list.map((one) => one.category))].filter(Boolean);
    const places = new Map(categories.map((name, place) => [name, place]));
    R.size = list.length;
    R.all.categories.splice(0, Infinity, ...categories);
    for (const name of Object.keys(R.all.kinds)) R.all[name] = Float64Array.from(list, (one) => one[name] ?? NaN);
    R.all.category = Int32Array.from(list, (one) => places.get(one.category) ?? -1);
    for (const name of ["message", "answer", "prompt", "label"]) R.all[name] = list.map((one) => one[name]);
  }

  function headline(doc) {
    for (const id of ["notices", "summary"]) document.getElementById(id).replaceWith(document.adoptNode(doc.getElementById(id)));
    R.shares();
  }

  function words(state) {
    const ended = R.count(state.settled) + " of " + R.count(state.total) + " attempts have ended";
    if (state.over) return ended;
    const parts = [ended, R.count(state.in_flight) + " in flight"];
    if (state.rate) parts.push(state.rate);
    const left = state.remaining_sec === null ? 0 : Math.ceil(state.remaining_sec);
    if (left > 0) parts.push("about " + (left < 100 ? left + " s" : R.seconds(left)) + " to go");
    return parts.join(" · ") + (state.trouble ? " · this page cannot be updated: " + state.trouble : "");
  }

  async function draw(state) {
    const doc = await read("./");
    pending = () => {
      headline(doc);
      R.charts = JSON.parse(doc.getElementById("data").textContent).charts;
      arrange();
      R.retable();
      R.plots();
    };
    drawn = state.version;
  }

  // The report holds all that it shows, so this page needs no server from here on.
  async function end() {
    const doc = await read("report.html");
    pending = async () => {
      headline(doc);
      const data = JSON.parse(doc.getElementById("data").textContent);
      R.source = doc;
      R.charts = data.charts;
      R.all.categories.splice(0, Infinity, ...data.attempts.categories);
      R.size = R.all.size = data.attempts.size;
      Object.assign(R, ofReport);
      await R.load();
      R.retable();
      R.plots();
    };
    tell("The run is over: every attempt has ended. This page needs no server any more; it is report.html in the folder of the run.");
  }

  // What is open stands: its attempt has another place once others have come.
  function show() {
    if (!pending || dialog.open) return;
    const action = pending;
    pending = null;
    return action();
  }
  dialog.addEventListener("close", show);

  // The server lets a second pass before it answers.
  async function follow() {
    try {
      for (let over = null; !over;) {
        const state = await news("&wait");
        over = state.over;
        if (over === "complete") await end();
        else if (over) tell("The run has stopped: " + words(state) + ". Conversations that are not open are in its folder, and in report.html once it is written.");
        else tell(words(state));
        if (state.version !== drawn && over !== "complete") await draw(state);
        await show();
        if (over) await ask("bye?page=" + page);
      }
    } catch {
      tell("The command that ran the evaluation does not answer; it may have ended. What has come stays here. Trying again…", true);
      setTimeout(follow, 3000);
    }
  }

  R.load = async () => {
    await news();
    arrange();
    setTimeout(follow, 0);
  };
  R.prompt = (index) => R.all.prompt[index];
  R.label = (index) => R.all.label[index];
  R.entry = async (index) => {
    try {
      return JSON.parse(await ask("attempt/" + R.name(index)));
    } catch (error) {
      throw new Error("the run's server does not give it: " + error.message);
    }
  };
  R.scan = () => Promise.reject(new Error("while the run goes on, the table alone can be searched."));
})();
