// --- the plots of a run ---------------------------------------------------------------------

(() => {
  const { el, svg } = R;

  const sorted = (values) => Float64Array.from(values).sort();
  function quantile(ordered, share) {
    if (!ordered.length) return null;
    const place = share * (ordered.length - 1);
    const low = Math.floor(place);
    return ordered[low] + ((ordered[Math.min(low + 1, ordered.length - 1)] - ordered[low]) * (place - low));
  }

  function bin(count) {
    return Array.from({ length: count }, () => ({ counts: {}, total: 0 }));
  }
  function put(target, index) {
    const state = R.state(index);
    target.counts[state] = (target.counts[state] || 0) + 1;
    target.total += 1;
  }
  const parts = (found) => R.all.states.filter((state) => found.counts[state])
    .map((state) => R.NAMES[state] + ": " + R.count(found.counts[state]));
  const head = (first) => [first, ...R.all.states.map((state) => R.NAMES[state]), "All"];
  const line = (label, found) =>
    [label, ...R.all.states.map((state) => R.count(found.counts[state] || 0)), R.count(found.total)];
  const having = (column) => {
    const found = [];
    for (let index = 0; index < R.size; index++) if (R.told(column[index])) found.push(index);
    return found;
  };

  function rewards() {
    const with_ = having(R.all.reward);
    const values = sorted(with_.map((index) => R.all.reward[index]));
    if (!values.length) return null;
    const distinct = new Set();
    for (const value of values) { distinct.add(value); if (distinct.size > 9) break; }
    const low = values[0];
    const threshold = R.charts.threshold;
    const greatest = values[values.length - 1];
    // A threshold that nothing reaches is drawn too, unless it is far away.
    const near = threshold !== null && threshold > greatest && threshold - values[0] <= 4 * (greatest - values[0]);
    const high = near ? threshold : greatest;
    const note = R.count(with_.length) + (with_.length === 1 ? " attempt" : " attempts") + " with a reward" +
      (with_.length < R.size ? "; " + R.count(R.size - with_.length) + " have none" : "") +
      (threshold === null ? "" : "; passed from " + R.tick(threshold));
    const span = high - low;
    const exact = distinct.size <= 9 || !Number.isFinite(span);
    let bins;
    let labels;
    let marks = [];
    if (exact) {
      const each = [...distinct].sort((a, b) => a - b);
      bins = bin(each.length);
      for (const index of with_) put(bins[each.indexOf(R.all.reward[index])] || bins[bins.length - 1], index);
      each.forEach((value, i) => Object.assign(bins[i], { from: value, to: value, label: R.tick(value) }));
      labels = each.map((value, i) => [(i + 0.5) / each.length, R.tick(value)]);
      if (threshold !== null) {
        const below = each.filter((value) => value < threshold).length;
        marks = [{ place: below / each.length, text: "pass from " + R.tick(threshold) }];
      }
    } else {
      const ticks = R.ticks(low, high, 20);
      const step = ticks[1] - ticks[0];
      const start = Math.floor(low / step + 1e-9) * step;
      const many = Math.max(1, Math.min(60, Math.floor((high - start) / step + 1e-9) + 1));
      const place = (value) => (value - start) / (step * many);
      bins = bin(many);
      for (const index of with_) {
        put(bins[Math.min(many - 1, Math.max(0, Math.floor((R.all.reward[index] - start) / step + 1e-9)))], index);
      }
      bins.forEach((found, i) => {
        const [from, to] = [i, i + 1].map((edge) => Number((start + edge * step).toPrecision(12)));
        Object.assign(found, { from, to, label: R.tick(from) + " to " + R.tick(to), open: i < many - 1 });
      });
      labels = R.ticks(start, start + step * many, 6).map((value) => [place(value), R.tick(value)]);
      if (threshold !== null && place(threshold) >= 0 && place(threshold) <= 1) {
        marks = [{ place: place(threshold), text: "pass from " + R.tick(threshold) }];
      }
    }
    for (const found of bins) {
      found.hint = () => ["Reward " + found.label, ...parts(found)];
      found.pick = () => R.pick({ from: found.from, to: found.to, below: Boolean(found.open) });
    }
    return R.figure({
      title: "Rewards", note,
      label: "Histogram of rewards from " + R.tick(low) + " to " + R.tick(greatest) + ", median " + R.number(quantile(values, 0.5)) + ". " + note + ".",
      head: head("Reward"), rows: bins.map((found) => line(found.label, found)),
      draw: (picture, width, height) => R.bars(picture, width, height, { bins, name: "reward", marks, labels }),
    });
  }

  // Two curves over k, each with the band of its interval where there is one.
  function passes() {
    const curves = [
      ["at", "pass@k", "at least one of k passes", R.charts.pass_at],
      ["hat", "pass^k", "all of k pass", R.charts.pass_hat],
    ].filter((curve) => curve[3].length);
    if (!curves.length) return null;
    const last = Math.max(...curves.flatMap((curve) => curve[3].map((point) => point[0])));
    const rows = [];
    for (const [, name, , points] of curves) {
      for (const [k, value, low, high] of points) {
        rows.push([name, R.count(k), R.percent(value), low === null ? "–" : R.percent(low) + " to " + R.percent(high)]);
      }
    }
    return R.figure({
      title: "Passing in k attempts",
      note: curves.map((curve) => curve[1] + ": " + curve[2]).join(" · "),
      label: "Curves over k from 1 to " + last + ". " + curves.map((curve) => {
        const points = curve[3];
        return curve[1] + " goes from " + R.percent(points[0][1]) + " to " + R.percent(points[points.length - 1][1]);
      }).join(", ") + ".",
      head: ["Curve", "k", "Share of rows", "Interval"], rows,
      draw: (picture, width, height) => {
        const inner = R.frame(picture, width, height, {
          top: 1, ticks: [0, 0.25, 0.5, 0.75, 1], tickText: (value) => Math.round(value * 100) + "%", name: "k", right: 64,
        });
        const x = (k) => (last === 1 ? inner.left + inner.width / 2 : inner.left + 14 + ((k - 1) / (last - 1)) * (inner.width - 28));
        const every = Math.max(1, Math.ceil(last / Math.max(2, inner.width / 44)));
        for (let k = 1; k <= last; k += every) R.xTick(picture, inner, x(k), String(k));
        const ends = [];
        for (const [kind, name, , points] of curves) {
          const band = points.filter((point) => point[2] !== null);
          if (band.length > 1) {
            const edge = [...band.map((p) => [x(p[0]), inner.y(p[3])]), ...band.reverse().map((p) => [x(p[0]), inner.y(p[2])])];
            picture.append(svg("path", { class: "band c-" + kind, d: "M" + edge.map((p) => p.join(",")).join("L") + "Z" }));
          }
          picture.append(svg("path", { class: "line c-" + kind, d: "M" + points.map((p) => x(p[0]) + "," + inner.y(p[1])).join("L") }));
          for (const [k, value, low, high] of points) {
            if (low !== null && points.length === 1) {
              picture.append(svg("line", { class: "line c-" + kind, x1: x(k), x2: x(k), y1: inner.y(low), y2: inner.y(high) }));
            }
            const dot = svg("g", {}, svg("circle", { class: "hit", cx: x(k), cy: inner.y(value), r: 12 }),
              points.length <= 40 && svg("circle", { class: "dot c-" + kind, cx: x(k), cy: inner.y(value), r: 4 }));
            picture.append(R.hint(dot, () => [name.replace("k", String(k)) + " = " + R.percent(value),
              low === null ? "no interval" : R.percent(low) + " to " + R.percent(high)]));
          }
          const end = points[points.length - 1];
          // Not on the axis, where it would touch the numbers below.
          ends.push([kind, name, x(end[0]) + 10, Math.min(inner.y(end[1]) + 4, inner.bottom - 6)]);
        }
        if (ends.length === 2 && Math.abs(ends[0][3] - ends[1][3]) < 14) {
          const middle = (ends[0][3] + ends[1][3]) / 2;
          const lift = Math.max(0, middle + 7 - (inner.bottom - 6));
          ends[0][3] = middle - 7 - lift;
          ends[1][3] = middle + 7 - lift;
        }
        for (const [kind, name, left, y] of ends) picture.append(svg("text", { class: "curve-name c-" + kind, x: left, y }, name));
      },
    });
  }

  function durations() {
    const with_ = having(R.all.duration).filter((index) => R.all.duration[index] >= 0);
    if (!with_.length) return null;
    const values = sorted(with_.map((index) => R.all.duration[index]));
    const [low, high] = [values[0], values[values.length - 1]];
    const [middle, late] = [quantile(values, 0.5), quantile(values, 0.95)];
    // Few that take very long would leave one bar of the others: then steps grow with the time.
    const log = high > 20 * Math.max(middle, 1e-3);
    const floor = Math.max(low, 1e-3, high / 1e7);
    const to = log ? (value) => Math.log10(Math.max(value, floor)) : (value) => value;
    const from = log ? (value) => 10 ** value : (value) => value;
    const start = log ? to(floor) : 0;
    const end = Math.max(to(high), start + 1e-6);
    const many = 30;
    const step = (end - start) / many;
    const place = (value) => Math.min(1, Math.max(0, (to(value) - start) / (end - start)));
    const bins = bin(many);
    for (const index of with_) put(bins[Math.min(many - 1, Math.floor(place(R.all.duration[index]) * many))], index);
    bins.forEach((found, i) => {
      found.label = R.seconds(from(start + i * step)) + " to " + R.seconds(from(start + (i + 1) * step));
      found.hint = () => [found.label, ...parts(found)];
    });
    const labels = log
      ? [0, 0.25, 0.5, 0.75, 1].map((share) => [share, R.seconds(from(start + share * (end - start))), share === 1 ? "end" : share ? "middle" : "start"])
      : R.timeTicks(end, 6).map((value) => [place(value), R.timeTick(value), place(value) > 0.96 ? "end" : "middle"]);
    const note = "median " + R.seconds(middle) + " · 95% within " + R.seconds(late) + " · longest " + R.seconds(high);
    return R.figure({
      title: "Durations", note,
      label: "Histogram of the time that attempts took: " + note + ".",
      head: head("Duration"), rows: bins.filter((found) => found.total).map((found) => line(found.label, found)),
      draw: (picture, width, height) => R.bars(picture, width, height, {
        bins, name: log ? "duration (logarithmic)" : "duration", labels,
        marks: [{ place: place(middle), text: "median" }, { place: place(late), text: "95%" }],
      }),
    });
  }

  // Ends over the time that the run was at work: a pause between two sittings is cut out.
  function timeline() {
    const with_ = having(R.all.duration).filter((index) => R.all.duration[index] >= 0);
    if (with_.length < 2) return null;
    const spans = with_.map((index) => [R.all.submitted[index] / 1000, R.all.submitted[index] / 1000 + R.all.duration[index], index])
      .sort((a, b) => a[0] - b[0]);
    const busy = [];
    for (const [from, to] of spans) {
      const now = busy[busy.length - 1];
      if (now && from <= now[1] + 60) now[1] = Math.max(now[1], to);
      else busy.push([from, to]);
    }
    let at = 0;
    for (const one of busy) { one.push(at); at += one[1] - one[0]; }
    const total = Math.max(at, 1e-3);
    if (!Number.isFinite(total)) return null;
    const when = (time) => {
      let [left, right] = [0, busy.length - 1];
      while (left < right) {
        const half = (left + right + 1) >> 1;
        if (busy[half][0] <= time) left = half; else right = half - 1;
      }
      return busy[left][2] + time - busy[left][0];
    };
    const many = Math.min(60, Math.max(8, Math.ceil(with_.length / 4)));
    const bins = bin(many);
    for (const [, to, index] of spans) put(bins[Math.max(0, Math.min(many - 1, Math.floor((when(to) / total) * many)))], index);
    bins.forEach((found, i) => {
      found.label = R.seconds((i * total) / many) + " to " + R.seconds(((i + 1) * total) / many);
      found.hint = () => [found.label, R.number((found.total * many) / total, 2) + " attempts a second", ...parts(found)];
    });
    const pauses = busy.length - 1;
    const note = R.number(with_.length / total, 2) + " attempts a second over " + R.seconds(total) +
      (pauses ? " of work; " + R.count(pauses) + (pauses === 1 ? " pause" : " pauses") + " cut out (dashed)" : "");
    return R.figure({
      title: "Progress", note,
      label: "Attempts that ended over the time of the run: " + note + ".",
      head: head("Time"), rows: bins.map((found) => line(found.label, found)),
      draw: (picture, width, height) => R.bars(picture, width, height, {
        bins, name: "time at work",
        labels: R.timeTicks(total, 6).map((value) => [value / total, R.timeTick(value), value / total > 0.96 ? "end" : "middle"]),
        marks: busy.slice(1, 30).map((one) => ({ place: one[2] / total })),
      }),
    });
  }

  function categories() {
    const counts = new Map();
    for (let index = 0; index < R.size; index++) {
      const state = R.state(index);
      if (state === "passed" || state === "below" || state === "ungraded" || state === "removed") continue;
      const key = state + " " + R.categoryOf(index);
      if (!counts.has(key)) counts.set(key, { state, category: R.categoryOf(index), count: 0 });
      counts.get(key).count += 1;
    }
    if (!counts.size) return null;
    const all = [...counts.values()].sort((a, b) => b.count - a.count);
    const total = all.reduce((sum, one) => sum + one.count, 0);
    const list = el("ul", { class: "ranks" }, all.slice(0, 24).map((one) => {
      const bar = el("span", { class: "rank-bar s-" + one.state });
      bar.style.width = (one.count / all[0].count) * 100 + "%";
      return el("li", {}, el("button", {
        type: "button", class: "rank", title: "Show these attempts",
        onclick: () => R.pick({ states: [one.state], category: one.category }),
      },
      el("span", { class: "rank-name" }, R.icon(one.state), el("bdi", {}, R.plain(one.category || "no category", el("span")))),
      el("span", { class: "rank-track" }, bar),
      el("span", { class: "rank-count" }, R.count(one.count), " ", el("span", { class: "quiet" }, R.percent(one.count / R.size)))));
    }));
    return R.figure({
      title: "What went wrong", wide: true,
      note: R.count(total) + " of " + R.count(R.size) + " attempts ended without a result of the agent, by error category",
      body: el("div", {}, list, all.length > 24 && el("p", { class: "quiet" }, "and " + R.count(all.length - 24) + " more")),
    });
  }

  R.plots = () => {
    const found = [rewards(), passes(), durations(), timeline(), categories()].filter(Boolean);
    const holder = document.getElementById("charts");
    // Two side by side; one that would stand alone takes the whole line.
    const halves = found.filter((figure) => !figure.classList.contains("wide"));
    if (halves.length % 2) halves[halves.length - 1].classList.add("wide");
    for (const figure of found) {
      const before = document.getElementById(figure.id);
      if (before && before.querySelector("details[open]")) figure.querySelector("details").open = true;
    }
    if (found.length) holder.replaceChildren(...found);
    else holder.replaceChildren(el("p", { class: "quiet" }, "There is nothing to draw yet."));
  };
})();
