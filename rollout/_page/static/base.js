"use strict";
// Everything lives in one function each file adds to: R has what the others need.
const R = {};

// --- elements: data only ever becomes text nodes and checked attributes -----------------------

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  // Attributes that cannot run or load anything. `href` is refused unless it stays in the folder.
  const SAFE_HREF = /^(#[\w=&.%-]*|trajectories\/[\w.%-]+)$/;

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) {
        if (typeof value !== "function") throw new TypeError("handlers are functions");
        node.addEventListener(name.slice(2), value);
      } else if (name === "href" || name === "style" || name === "src") {
        if (name !== "href" || !SAFE_HREF.test(value)) throw new TypeError("refused: " + name);
        node.setAttribute(name, value);
      } else if (name === "value" || name === "checked" || name === "open") {
        node[name] = value;
      } else {
        node.setAttribute(name, value === true ? "" : String(value));
      }
    }
    for (const child of children.flat()) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  R.el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  R.svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  R.icon = (state) =>
    R.svg("svg", { class: "icon s-" + state, "aria-hidden": "true" }, R.svg("use", { href: "#i-" + state }));
  R.say = (text) => { document.getElementById("status").textContent = text; };
})();

// --- figures for people -----------------------------------------------------------------------

(() => {
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const cache = new Map();

  function decimals(digits) {
    if (!cache.has(digits)) {
      cache.set(digits, new Intl.NumberFormat("en-US", {
        minimumFractionDigits: digits, maximumFractionDigits: digits,
      }));
    }
    return cache.get(digits);
  }

  R.count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

  R.number = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(2);
    return decimals(size >= 1000 ? Math.min(digits, 1) : digits).format(value);
  };

  // As short as it can be said: for axes.
  R.tick = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(0).replace("e+", "e");
    return String(Number(value.toPrecision(6)));
  };

  R.percent = (share) => {
    if (share > 0 && share < 0.001) return "<0.1%";
    return (share * 100).toFixed(share === 0 || share === 1 ? 0 : 1) + "%";
  };

  R.seconds = (value) => {
    if (value === null || value === undefined) return "–";
    if (value < 0.9995) return Math.round(value * 1000) + " ms";
    if (value < 100) return value.toFixed(value < 9.95 ? 2 : 1) + " s";
    const total = Math.round(value);
    if (total < 3600) return Math.floor(total / 60) + " min " + String(total % 60).padStart(2, "0") + " s";
    return whole.format(Math.floor(total / 3600)) + " h " + String(Math.floor(total / 60) % 60).padStart(2, "0") + " min";
  };

  // On an axis a round time is said as short as it can be.
  R.timeTick = (value) => {
    if (value === 0) return "0";
    if (value < 1) return R.tick(value * 1000) + " ms";
    if (value < 180) return R.tick(value) + " s";
    if (value < 10800) return R.tick(value / 60) + " min";
    return R.tick(value / 3600) + " h";
  };

  R.when = (milliseconds) => {
    const date = new Date(milliseconds);
    return Number.isNaN(date.getTime()) ? "–" : date.toISOString().slice(0, 19).replace("T", " ");
  };
  R.clock = (milliseconds) => R.when(milliseconds).slice(-8);
})();

R.NAMES = {
  passed: "Passed", below: "Not passed", ungraded: "No reward", removed: "Removed",
  failure: "Failure", error: "Error", cancelled: "Cancelled",
};

// --- text that is not what it seems -----------------------------------------------------------

// Characters that turn the direction of text, hide, or control a terminal are shown by their
// number, so that a message reads the way it was written.
const MOST_MARKS = 200;

// Joiners and variation selectors 1 to 16 shape letters and emoji.
const ODD = /((?:(?![\u200c\u200d\ufe00-\ufe0f])[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffb\p{Default_Ignorable_Code_Point}])+)/u;

R.plain = (text, parent) => {
  text.split(ODD).forEach((part, index, parts) => {
    if (!part || index > 2 * MOST_MARKS) return;
    if (index === 2 * MOST_MARKS) part = parts.slice(index).map((one, at) => (at % 2 ? "\ufffd" : one)).join("");
    if (index % 2 === 0) {
      parent.append(document.createTextNode(part));
      return;
    }
    // A run of them is one mark: no text makes thousands of elements.
    const points = Array.from(part);
    const names = points.slice(0, 4).map((c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
    const more = points.length > 4 ? " +" + (points.length - 4) : "";
    parent.append(R.el("span", { class: "control" }, names.join(" ") + more));
  });
  return parent;
};
