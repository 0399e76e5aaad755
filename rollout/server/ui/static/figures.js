// --- figures, charts, workers and model calls ----------------------------------------------------

(() => {
  const { el, svg } = R;
  const byId = (id) => document.getElementById(id);

  function card(name, value, note) {
    return el("div", { class: "card" }, el("p", { class: "card-name" }, name),
      el("p", { class: "card-value" }, value), el("p", { class: "card-note" }, note));
  }

  function cards() {
    const { rollouts, rates, outcomes, slots, history } = R.live;
    const ended = rollouts.ended;
    const good = outcomes.success || 0;
    let [sum, count] = [0, 0];
    history.rewards.forEach((many, place) => { if (many) { sum += many * history.mean_reward[place]; count += many; } });
    const bound = slots && slots.max_concurrent;
    byId("cards").replaceChildren(
      card("Active", R.count(rollouts.active), R.count(rollouts.queued) + " queued, " + R.count(rollouts.running) + " running, " + R.count(rollouts.grading) + " grading" +
        (slots ? "; " + R.count(slots.running) + (bound ? " of " + R.count(bound) : "") + " slots in use" : "")),
      card("Ended a second", R.number(rates.ended, 2), R.number(rates.admitted, 2) + " admitted a second, over the last minute; " + R.count(rollouts.admitted) + " admitted in all"),
      card("Success", ended ? R.percent(good / ended) : "–", R.count(good) + " success, " + R.count(outcomes.failure || 0) + " failure, " + R.count(outcomes.cancelled || 0) + " cancelled"),
      card("Mean reward", count ? R.number(sum / count) : "–", R.count(count) + " rewards since the start"));
  }

  function head() {
    const { server } = R.live;
    const fact = (name, value) => el("span", { class: "fact" }, el("span", { class: "fact-name" }, name), " ", R.plain(String(value), el("bdi")));
    byId("name").replaceChildren(R.plain(String(server.application || location.host), el("bdi")));
    byId("facts").replaceChildren(
      fact("version", server.version), fact("up", R.seconds(Math.max(0, R.now() - server.started_at))),
      fact("instance", server.instance_id), ...(server.status === "ok" ? [] : [fact("backend", server.status)]));
  }

  // --- charts -----------------------------------------------------------------------------------

  const clock = (history, place) => R.clock((history.since + place * history.bin_sec) * 1000);

  function timeLabels(history) {
    const total = history.admitted.length * history.bin_sec;
    return R.timeTicks(total, 6).map((value) => [value / total, R.timeTick(value), value / total > 0.96 ? "end" : "middle"]);
  }

  function ends() {
    const { history } = R.live;
    const bins = history.admitted.map((_, place) => {
      const counts = Object.fromEntries(R.all.states.map((state) => [state, history[state][place]]));
      const total = R.all.states.reduce((sum, state) => sum + counts[state], 0);
      return { counts, total, hint: () => [clock(history, place) + " UTC", ...R.all.states.map((state) => R.NAMES[state] + ": " + R.count(counts[state])), "Admitted: " + R.count(history.admitted[place])] };
    });
    return {
      note: "Rollouts that ended, in bins of " + R.seconds(history.bin_sec) + " since the server's start",
      rows: bins.map((bin, place) => [clock(history, place), ...R.all.states.map((state) => R.count(bin.counts[state]))]),
      draw: (picture, width, height) => R.bars(picture, width, height, { bins, name: "time since the start", labels: timeLabels(history) }),
    };
  }

  function rewards() {
    const { history } = R.live;
    const points = history.mean_reward.map((mean, place) => [place, mean]).filter(([, mean]) => mean !== null);
    const [low, high] = [Math.min(0, ...points.map((one) => one[1])), Math.max(1, ...points.map((one) => one[1]))];
    return {
      note: "Mean reward of the rollouts that ended in each " + R.seconds(history.bin_sec),
      rows: points.map(([place, mean]) => [clock(history, place), R.number(mean), R.count(history.rewards[place])]),
      draw: (picture, width, height) => {
        const ticks = R.ticks(low, high, 4).map((tick) => tick - low);
        const inner = R.frame(picture, width, height, { top: high - low, ticks, tickText: (value) => R.tick(value + low), name: "time since the start" });
        const x = (place) => inner.left + ((place + 0.5) / history.admitted.length) * inner.width;
        picture.append(svg("polyline", { class: "line c-at", points: points.map(([place, mean]) => x(place) + "," + inner.y(mean - low)).join(" ") }));
        for (const [place, mean] of points) {
          picture.append(R.hint(svg("circle", { class: "dot c-at", cx: x(place), cy: inner.y(mean - low), r: 3 }),
            () => [clock(history, place) + " UTC", "Mean reward: " + R.number(mean), R.count(history.rewards[place]) + " rewards"]));
        }
        for (const [place, text, anchor] of timeLabels(history)) R.xTick(picture, inner, inner.left + place * inner.width, text, anchor);
      },
    };
  }

  const spans = (which, what) => () => {
    const { bounds_sec: bounds, [which]: { counts, total_sec: total } } = R.live.durations;
    const many = counts.reduce((sum, count) => sum + count, 0);
    const name = (place) => (place < bounds.length ? "up to " + R.timeTick(bounds[place]) : "longer");
    const last = Math.max(counts.findLastIndex((count) => count > 0), 3);
    const bins = counts.slice(0, last + 1).map((count, place) => ({ counts: { success: count }, total: count, hint: () => [name(place), R.count(count) + " rollouts"] }));
    return {
      note: what + (many ? ": " + R.seconds(total / many) + " on average" : ""),
      rows: bins.map((bin, place) => [name(place), R.count(bin.total)]),
      draw: (picture, width, height) => R.bars(picture, width, height, {
        bins, name: "up to", labels: bins.map((_, place) => [(place + 0.5) / bins.length, place < bounds.length ? R.timeTick(bounds[place]) : "more"]),
      }),
    };
  };

  function failures() {
    const all = Object.entries(R.live.failures).sort((a, b) => b[1] - a[1]);
    if (!all.length) return el("p", { class: "quiet" }, "Nothing has failed.");
    return el("ul", { class: "ranks" }, all.map(([category, count]) => {
      const bar = el("span", { class: "rank-bar s-failure" });
      bar.style.width = (count / all[0][1]) * 100 + "%";
      return el("li", {}, el("button", { type: "button", class: "rank", title: "Show these rollouts", onclick: () => R.search(category) },
        el("span", { class: "rank-name" }, R.icon("failure"), R.plain(category, el("bdi"))),
        el("span", { class: "rank-track" }, bar), el("span", { class: "rank-count" }, R.count(count))));
    }));
  }

  const CHARTS = [
    ["Ended over time", ends, ["Time", "Success", "Failure", "Cancelled"]],
    ["Reward over time", rewards, ["Time", "Mean reward", "Rewards"]],
    ["Time in the queue", spans("queued", "From the admission to the start of the agent"), ["Duration", "Rollouts"]],
    ["Time of the agent and grader", spans("ran", "From the agent's start to the end"), ["Duration", "Rollouts"]],
  ];
  let drawn = null;
  const holder = el("div");

  function charts() {
    holder.replaceChildren(failures());
    if (drawn === null) {
      drawn = CHARTS.map(([title, make, columns]) => R.figure({ title, label: title, head: columns, ...make() }));
      byId("charts").append(...drawn, R.figure({ title: "What went wrong", wide: true, note: "Failures since the server's start, by error category", body: holder }));
    } else drawn.forEach((figure, place) => figure.refresh(CHARTS[place][1]()));
  }

  // --- workers and model calls ------------------------------------------------------------------

  const plain = (value) => (typeof value === "number" ? R.number(value, Number.isInteger(value) ? 0 : 2) : value === null ? "–" : String(value));
  function listed(list) {
    const names = [...new Set(list.flatMap((one) => Object.keys(one).filter((name) => typeof one[name] !== "object" || one[name] === null)))];
    return el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name.replaceAll("_", " "))))),
      el("tbody", {}, list.map((one) => el("tr", {}, names.map((name) => el("td", {}, R.plain(one[name] === undefined ? "" : plain(one[name]), el("bdi"))))))));
  }

  function numbers(value, path = []) {
    if (Array.isArray(value)) return [];
    if (typeof value === "object" && value !== null) return Object.entries(value).flatMap(([name, one]) => numbers(one, [...path, name]));
    return [[path.slice(-2).join(" ").replaceAll("_", " "), plain(value)]];
  }

  function parts() {
    const { workers, gateway } = R.live;
    byId("workers").hidden = !workers;
    if (workers) byId("workers").querySelector(".scroll").replaceChildren(listed(workers));
    byId("calls").hidden = !gateway;
    if (!gateway) return;
    byId("calls").querySelector("dl").replaceChildren(...numbers(gateway).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, R.plain(value, el("bdi"))))));
    const upstreams = (gateway.flow || {}).upstreams || [];
    byId("calls").querySelector(".scroll").replaceChildren(...(upstreams.length ? [listed(upstreams)] : []));
  }

  R.figures = () => { head(); cards(); charts(); parts(); };
})();
