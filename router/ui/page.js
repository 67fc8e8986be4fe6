// What does the page do? It asks for one document every two seconds and shows it. Whatever comes is text, never markup.

import { plot } from "/ui/plots.js";

const PERIOD_MS = 2000, PATIENCE_MS = 10000, KEPT = "commutator-admin-token";
const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem(KEPT) ?? "", paused = false, latest = null, heardAt = 0, trouble = "", timer = 0, asking = false;

// ---------------------------------------------------------------------------------------------- words

const missing = "–";
const number = (value, digits = 0) => (value === null || value === undefined ? missing : value.toLocaleString("en", { maximumFractionDigits: digits }));
const percent = (value) => (value === null || value === undefined ? missing : `${Math.round(value * 100)} %`);
const seconds = (value) =>
  value === null || value === undefined ? missing : value < 0.9995 ? `${+(value * 1000).toPrecision(3)} ms` : value < 100 ? `${+value.toPrecision(3)} s` : `${Math.round(value)} s`;
const ago = (value) => (value < 1 ? "just now" : value < 90 ? `${Math.round(value)} s ago` : `${Math.round(value / 60)} min ago`);
function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${+value.toPrecision(3)} ${units[at]}`;
}
const words = (name) => String(name).replaceAll("_", " ");
const place = (engine, rank, ranks) => (ranks > 1 || rank > 0 ? `${engine} rank ${rank}` : engine);

// ---------------------------------------------------------------------------------------------- elements

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** One child of `parent` for each item, kept from one document to the next by its key: a reader's selection and focus stay. */
function keyed(parent, items, keyOf, create, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    let child = before.get(key);
    if (child) before.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of before.values()) child.remove();
}

function cells(row, columns, values) {
  columns.forEach((column, index) => {
    const cell = row.children[index], value = values[index];
    if (value instanceof Node) {
      if (cell.dataset.is !== value.dataset.is) {
        cell.dataset.is = value.dataset.is;
        cell.replaceChildren(value);
      }
    } else say(cell, value);
  });
}

const blankRow = (columns) => () =>
  make("tr", {}, ...columns.map((column, index) => (index ? make("td", { "data-label": column }) : make("th", { scope: "row", class: "id" }))));

/** Several lines of a cell; rebuilt only when what they say has changed. */
function lines(...parts) {
  const box = make("div", {}, ...parts.map(([text, kind]) => make("span", { class: kind ?? "" }, text)));
  box.dataset.is = JSON.stringify(parts);
  return box;
}

// ---------------------------------------------------------------------------------------------- sections

function showTroubles(found) {
  const items = found.length ? found : [{ level: "well", what: "All is well.", mend: "" }];
  const label = { error: "Error:", warning: "Warning:", note: "Note:", well: "" };
  keyed(
    $("trouble-list"), items, (one) => `${one.level} ${one.what}`,
    (one) => make("li", { class: one.level }, label[one.level] ? make("strong", {}, label[one.level]) : null, one.what,
      one.mend ? make("span", { class: "mend" }, one.mend) : null),
    () => {},
  );
  const errors = found.filter((one) => one.level === "error").length;
  document.title = errors ? `(${errors}) Commutator` : "Commutator";
}

function tiles(list, items) {
  keyed(
    list, items, (one) => one[0], (one) => make("div", {}, make("dt", {}, one[0]), make("dd", {}, make("span"), make("small"))),
    (tile, [, value, beside]) => {
      say(tile.querySelector("dd span"), value);
      say(tile.querySelector("dd small"), beside ?? "");
    },
  );
}

function showNumbers(state) {
  const late = state.late, waiting = Object.values(state.waiting).reduce((sum, count) => sum + count, 0);
  tiles($("numbers"), [
    ["Requests per second", number(late.requests_per_s, 1), `${number(state.in_progress)} in progress, ${number(waiting)} waiting for room`],
    ["Hit rate", percent(late.hit_rate), `${percent(late.expected_hit_rate)} expected`],
    ["TTFT, median", seconds(late.ttft.p50), `95 %: ${seconds(late.ttft.p95)}`],
    ["Between tokens, median", seconds(late.itl.p50), `95 %: ${seconds(late.itl.p95)}`],
    ["Tokens generated per second", number(late.output_tokens_per_s, 1), "as engines told"],
    ["Failed", number(late.failed), `${number(late.shed)} answered 429, ${number(late.left)} clients left`],
    ["Prefix index", `${number(state.index.blocks)} blocks`, `${bytes(state.index.bytes)} of memory`],
  ]);
}

const caption = (name, last) => `${name}: median ${seconds(last.p50)}, 95 % ${seconds(last.p95)}, 99 % ${seconds(last.p99)} in the last minute`;

function showPlots(state) {
  const { latency, late } = state;
  for (const [id, name] of [["ttft", "Time to first token"], ["itl", "Time between tokens"]]) {
    plot($(id), { median: latency[id].p50, "95 %": latency[id].p95, "99 %": latency[id].p99 }, { slotSeconds: latency.slot_s, format: seconds, log: true });
    say($(`${id}-caption`), caption(name, late[id]));
  }
  plot($("rate"), { requests: latency.requests.map((count) => count / latency.slot_s) },
    { slotSeconds: latency.slot_s, format: (value) => number(value, 2), log: false });
  say($("rate-caption"), `Requests per second: ${number(late.requests_per_s, 1)} in the last minute`);
}

const FLEET = ["Engine", "Role", "State", "KV events", "In flight", "Running, waiting", "KV usage", "Hit rate", "Blocks known"];

function usage(value) {
  if (value === null || value === undefined) return missing;
  const box = make("div", { class: "usage" }, make("meter", { min: "0", max: "1", high: "0.9", value: String(value), "aria-label": "KV usage" }), ` ${percent(value)}`);
  box.dataset.is = percent(value);
  return box;
}

function showFleet(engines) {
  const rows = engines.flatMap((engine) =>
    engine.endpoints.length ? engine.endpoints.map((endpoint) => ({ engine, endpoint })) : [{ engine, endpoint: null }]);
  keyed(
    $("fleet").tBodies[0], rows, ({ engine, endpoint }) => `${engine.id}#${endpoint?.rank ?? 0}`, blankRow(FLEET),
    (row, { engine, endpoint }) => {
      const kind = [engine.kind, engine.version, (engine.models ?? []).map((model) => model.id).slice(0, 4).join(", ")].filter(Boolean).join(" · ");
      const states = engine.states ? Object.entries(engine.states).map(([process, state]) => `process ${process}: ${state}`).join(", ") : "";
      cells(row, FLEET, [
        lines([place(engine.id, endpoint?.rank ?? 0, engine.endpoints.length)], [kind, "reason"]),
        engine.role ?? missing,
        lines([engine.state, `state is-${engine.state}`], [engine.waiting_for || states, "reason"]),
        endpoint ? lines([endpoint.signal.state, `state is-${endpoint.signal.state}`], [endpoint.signal.reason, "reason"]) : missing,
        endpoint ? lines([number(endpoint.load.active_requests)], [`${number(endpoint.load.active_prefill_tokens)} prompt tokens to compute`, "reason"]) : missing,
        endpoint ? `${number(endpoint.load.running)}, ${number(endpoint.load.waiting)}` : missing,
        endpoint ? usage(endpoint.load.kv_usage) : missing,
        endpoint ? lines([percent(endpoint.hit_rate)], [`${percent(endpoint.expected_hit_rate)} expected, ${number(endpoint.recent_requests)} requests`, "reason"]) : missing,
        endpoint ? lines([number(endpoint.cached_blocks.device)],
          [[["host", endpoint.cached_blocks.host], ["disk", endpoint.cached_blocks.disk], ["predicted", endpoint.predicted_blocks]]
            .filter(([, count]) => count).map(([name, count]) => `${number(count)} ${name}`).join(", "), "reason"]) : missing,
      ]);
    },
  );
}

function showDisagg(disagg) {
  $("disagg-section").hidden = !disagg;
  if (!disagg) return;
  const counts = Object.entries(disagg.transfers).map(([name, count]) => `${number(count)} ${name}`).join(", ");
  say($("disagg-mode"), `Mode: ${disagg.mode}. KV transfers since the start: ${counts}.`);
  tiles($("disagg-why"), Object.entries(disagg.recent).sort((a, b) => b[1] - a[1]).map(([why, count]) => [words(why), number(count), "in ten minutes"]));
  const columns = ["Prefill", "Decode", "Throughput", "Judged"];
  keyed($("links").tBodies[0], disagg.links, (link) => `${link.prefill} ${link.decode}`, blankRow(columns), (row, link) =>
    cells(row, columns, [link.prefill, link.decode, `${bytes(link.bytes_per_s)}/s`, link.slow || "as it should be"]));
}

/** A value of any shape as a list, a table of names, or words. */
function shape(value) {
  if (Array.isArray(value)) return make("ul", {}, ...value.map((one) => make("li", {}, shape(one))));
  if (value !== null && typeof value === "object")
    return make("dl", {}, ...Object.entries(value).map(([name, one]) => make("div", {}, make("dt", {}, words(name)), make("dd", {}, shape(one)))));
  return document.createTextNode(typeof value === "number" ? number(value, 3) : value === null ? missing : String(value));
}

function showPlans(plans) {
  $("plan-section").hidden = !plans.length;
  keyed($("plan"), plans, (plan) => JSON.stringify({ ...plan, age_s: 0 }), (plan) => {
    const { age_s, planner, ...rest } = plan;
    return make("article", {}, make("h3", {}, `${planner}, `, make("span", { class: "when" })), shape(rest));
  }, (article, plan) => say(article.querySelector(".when"), ago(plan.age_s)));
}

const CANDIDATES = ["Candidate", "Cost", "Cached", "In flight there", "Requests", "KV events"];

function candidates(one) {
  const body = one.candidates.map((candidate) => {
    const { overlap } = candidate, cached = overlap.device + overlap.host + overlap.disk;
    const chosen = candidate.engine === one.engine && candidate.rank === one.rank;
    return make("tr", chosen ? { class: "chosen" } : {},
      make("th", { scope: "row", class: "id" }, place(candidate.engine, candidate.rank, 1), chosen ? " (chosen)" : ""),
      make("td", {}, number(candidate.cost, 3)),
      make("td", {}, `${number(cached)} of ${number(candidate.prompt_blocks)} blocks${overlap.predicted ? ", predicted" : ""}`),
      make("td", {}, `${number(Math.max(0, overlap.in_flight - overlap.device))} blocks`),
      make("td", {}, number(candidate.load.active_requests)),
      make("td", {}, candidate.signal ? candidate.signal.state : "not asked"));
  });
  const rejected = (one.rejected ?? []).map((other) =>
    make("tr", {}, make("th", { scope: "row", class: "id" }, place(other.engine, other.rank, 1)), make("td", { colspan: "5" }, `not a candidate: ${words(other.reason)}`)));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" },
    make("table", {}, make("thead", {}, make("tr", {}, ...CANDIDATES.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...body, ...rejected)));
}

function decision(one) {
  const cached = one.cached_tokens === null ? "" : `, ${number(one.cached_tokens)} found cached`;
  const text = `${one.model} → ${place(one.engine, one.rank, 1)}: ${words(one.reason)}; ${number(one.prompt_tokens)} prompt tokens, ` +
    `${number(one.overlap_tokens)} expected cached${cached}; ${one.ttft_s === null ? `done in ${seconds(one.duration_s)}` : `first token in ${seconds(one.ttft_s)}`}`;
  const bad = one.failure || one.status >= 400;
  const details = make("details", {},
    make("summary", {}, make("span", { class: "when" }), text, bad ? make("span", { class: "failed" }, ` — ${one.status}${one.failure ? `: ${one.failure}` : ""}`) : null),
    make("p", { class: "small" }, `${one.path}, policy ${one.policy}, ${number(one.tries)} ${one.tries === 1 ? "try" : "tries"}, ${number(one.completion_tokens)} tokens generated` +
      (one.process === undefined ? "" : `, process ${one.process}`)),
    candidates(one));
  if (one.prefill) {
    const { prefill } = one;
    const where = prefill.remote ? `computed by ${prefill.engine}` : "computed where it is decoded";
    const compared = prefill.remote_s === null ? "" : `; expected ${seconds(prefill.remote_s)} there, ${seconds(prefill.local_s)} here`;
    details.append(make("p", {}, `Prompt ${where}: ${words(prefill.reason)}${compared}.`));
    if (prefill.candidates) details.append(candidates(prefill));
  }
  return make("li", {}, details);
}

function showDecisions(found) {
  $("no-decisions").hidden = found.length > 0;
  keyed($("decisions"), found, (one) => one.id, decision, (item, one) => say(item.querySelector(".when"), ago(one.age_s)));
}

function show(state) {
  const { up, silent } = state.processes;
  say($("about"), `${state.version} · policy ${state.policy} · ${up + silent.length === 1 ? "one process" : `${up} of ${up + silent.length} processes`}` +
    (state.peers ? ` · ${state.peers} other routers and relays on the bus` : ""));
  showTroubles(state.troubles);
  showNumbers(state);
  showPlots(state);
  showFleet(state.engines);
  showPlans(state.plans);
  showDisagg(state.disagg);
  showDecisions(state.decisions);
}

// ---------------------------------------------------------------------------------------------- asking

function wantToken(why) {
  $("main").hidden = true;
  $("door").hidden = false;
  $("refused").textContent = why;
  $("token").focus();
}

async function ask() {
  if (asking || !token) return;
  asking = true;
  try {
    const answer = await fetch("/ui/state", { headers: { authorization: `Bearer ${token}` }, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) {
      token = "";
      sessionStorage.removeItem(KEPT);
      wantToken("That is not the token.");
      return;
    }
    if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
    latest = await answer.json();
    heardAt = performance.now();
    trouble = "";
    sessionStorage.setItem(KEPT, token);
    $("door").hidden = true;
    $("main").hidden = false;
    show(latest);
  } catch (error) {
    trouble = error.name === "TypeError" || error.name === "TimeoutError" ? "the router does not answer" : error.message;
  } finally {
    asking = false;
    freshness();
  }
}

function freshness() {
  const age = latest ? ago((performance.now() - heardAt) / 1000) : "";
  const text = !token ? "not connected" : paused ? "paused" : trouble ? `${trouble}${age ? `; shown as of ${age}` : ""}` : "live";
  say($("freshness"), text);
  $("freshness").className = trouble ? "failed" : "";
}

function again() {
  clearInterval(timer);
  timer = setInterval(() => {
    if (!paused && !document.hidden) ask();
    freshness();
  }, PERIOD_MS);
  ask();
}

$("door").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  $("refused").textContent = "";
  again();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) ask();
  freshness();
});
document.addEventListener("visibilitychange", () => !document.hidden && !paused && ask());
addEventListener("resize", () => latest && showPlots(latest));

if (token) again();
else wantToken("");
