// The episode browser: select a file and an episode, and see its turns, observations and rewards.

const browser = { file: 0, episode: 0, outcome: "any", env: "any", colouring: "log-prob" };
const outcomeOf = (episode) => (episode.failed ? "failed" : episode.won ? "won" : "lost");
const MARKS = { won: "\u2713", lost: "\u2717", failed: "\u2205" };

function fileLabel(file) {
  return (file.validation ? "validation at step " : "step ") + whole(file.step) + DOT + file.episodes.length +
    (file.episodes.length < file.total ? " of " + whole(file.total) : "") + " episodes";
}

function episodesSection() {
  const { files, total_files } = DATA.episodes;
  const shown = files.reduce((sum, file) => sum + file.episodes.length, 0);
  const played = files.reduce((sum, file) => sum + file.total, 0);
  const unreadable = files.reduce((sum, file) => sum + file.unreadable, 0);
  const note = "Showing " + whole(shown) + " of the " + whole(played) + " episodes in " + files.length +
    (files.length < total_files ? " of " + whole(total_files) : "") + " files; trajectories/ contains all of them." +
    (unreadable ? " " + unreadable + " lines could not be read." : "");
  const list = el("div", { class: "list card", role: "listbox", "aria-label": "episodes" });
  const view = el("article", { class: "card" });
  const scale = el("span", { class: "scale" });
  const envs = [...new Set(files.flatMap((file) => file.episodes.map((episode) => episode.env)))].sort();

  const fileSelect = select("file", files.map((file, i) => [i, fileLabel(file)]), (value) => { browser.file = Number(value); });
  const outcomeSelect = select("outcome", [["any", "won and lost"], ["won", "won"], ["lost", "lost"], ["failed", "failed"]],
    (value) => { browser.outcome = value; });
  const envSelect = select("environment", [["any", "all"], ...envs.map((env) => [env, env])], (value) => { browser.env = value; });
  const colouring = choice([["log-prob", "log-prob"], ["advantage", "advantage"], ["none", "none"]], browser.colouring,
    (value) => { browser.colouring = value; showEpisode(); });

  function select(label, options, onChoose) {
    const node = el("select", { onchange: () => { onChoose(node.value); browser.episode = 0; showList(); } },
      ...options.map(([value, text]) => el("option", { value }, text)));
    return { node, labelled: el("label", {}, label, node) };
  }

  const matching = () => files[browser.file].episodes.filter((episode) =>
    (browser.outcome === "any" || outcomeOf(episode) === browser.outcome) &&
    (browser.env === "any" || episode.env === browser.env));

  function showList() {
    const found = matching();
    list.replaceChildren(...found.map((episode, i) => {
      const outcome = outcomeOf(episode);
      const detail = episode.failed ? episode.failed.kind : counted(episode.turns.length, "turn") + DOT + "reward " + number(episode.reward);
      return el("button", { type: "button", "aria-current": String(i === browser.episode), onclick: () => {
        browser.episode = i;
        [...list.children].forEach((b, j) => b.setAttribute("aria-current", String(j === i)));
        showEpisode();
      } }, el("span", { class: "mark " + outcome }, MARKS[outcome]), el("span", { class: "name" }, episode.id),
      el("span", { class: "soft" }, "#" + (episode.number + 1)), el("span", { class: "detail" }, detail));
    }));
    if (!found.length) list.append(el("p", { class: "soft" }, "No episode in this selection."));
    showEpisode();
  }

  function showEpisode() {
    const episode = matching()[browser.episode];
    const learned = episode && !episode.failed && episode.turns.some((turn) => turn.advantages);
    if (!episode) view.replaceChildren(el("p", { class: "soft" }, "Choose an episode."));
    else if (episode.failed) view.replaceChildren(...failedView(episode));
    else view.replaceChildren(...episodeView(episode));
    const hasTokens = episode && !episode.failed && episode.turns.some((turn) => turn.tokens);
    scale.replaceChildren(...(hasTokens ? scaleOf(learned, reach(episode)) : []));
  }

  fileSelect.node.value = String(browser.file = startFile(files));
  showList();
  return section("Episodes", el("p", { class: "soft" }, note),
    el("div", { class: "controls" }, fileSelect.labelled, outcomeSelect.labelled, envs.length > 1 ? envSelect.labelled : null,
      el("label", {}, "colour tokens by", colouring), scale),
    el("div", { class: "browser" }, list, view));
}

// The newest training file, because its episodes have advantages.
function startFile(files) {
  const training = files.map((file, i) => i).filter((i) => !files[i].validation && files[i].episodes.length);
  return training.length ? training[training.length - 1] : files.length - 1;
}

function titleOf(episode, text) {
  const outcome = outcomeOf(episode);
  return el("div", { class: "title" }, el("h3", {}, episode.id), el("span", { class: "badge " + outcome }, outcome), el("span", { class: "soft" }, text));
}

function failedView(episode) {
  return [titleOf(episode, episode.failed.kind + DOT + counted(episode.attempts, "attempt") + DOT + "not trained on"),
    el("pre", { class: "text" }, episode.failed.error)];
}

const ENDS = { done: "the environment ended it", max_turns: "out of turns", context: "out of tokens", gave_up: "gave up" };

function episodeView(episode) {
  const facts = [episode.env, "reward " + number(episode.reward), ENDS[episode.end] || episode.end,
    episode.attempts > 1 ? episode.attempts + " attempts" : null,
    ...Object.entries(episode.parts).filter((_, i, all) => all.length > 1).map(([name, value]) => name + " " + number(value))];
  const opening = el("details", {}, el("summary", {}, "First prompt"),
    ...episode.opening.flatMap(([role, text]) => [el("div", { class: "role" }, role), el("pre", { class: "text" }, text)]));
  const span = reach(episode);
  return [titleOf(episode, facts.filter(Boolean).join(DOT)), el("div", { class: "soft" }, episode.uid), opening,
    el("pre", { class: "text seen" }, episode.first), ...episode.turns.map((turn, i) => turnView(turn, i, span))];
}

function turnView(turn, index, span) {
  const reward = turn.reward ? el("span", { class: turn.reward > 0 ? "up" : "down" }, "reward " + number(turn.reward)) : el("span", {}, "reward 0");
  const action = turn.action === null ? el("span", { class: "down" }, "no valid action") : el("code", {}, turn.action);
  const tokenCount = turn.tokens ? el("span", {}, counted(turn.tokens.length + turn.more_tokens, "token")) : null;
  const bar = el("div", { class: "bar" }, el("b", {}, "Turn " + (index + 1)), action, reward, tokenCount,
    turn.cut ? el("span", { class: "down" }, "truncated") : null,
    el("span", { title: "generation, environment" }, number(turn.seconds[0]) + " s, env " + number(turn.seconds[1]) + " s"));
  const said = el("div", { class: "text said" }, ...(turn.tokens ? tokensOf(turn, span) : [turn.text]));
  return el("div", { class: "turn" }, bar, said, el("pre", { class: "text seen" }, turn.observation));
}

function tokensOf(turn, span) {
  const nodes = turn.tokens.map((text, i) => {
    const log_prob = turn.log_probs[i], advantage = turn.advantages ? turn.advantages[i] : null;
    const token = el("span", { class: "token", onpointerenter: (event) => showTip(event, JSON.stringify(text), [
      [null, "token", String(turn.ids[i])],
      [null, "log-prob", number(log_prob) + " (p " + number(Math.exp(log_prob)) + ")"],
      [null, "advantage", advantage === null ? "not trained on" : number(advantage)],
    ]), onpointerleave: hideTip }, ...visible(text));
    const back = backgroundOf(log_prob, advantage, span);
    if (back) token.style.background = back;
    return token;
  });
  if (turn.more_tokens) nodes.push(el("span", { class: "soft" }, " [" + turn.more_tokens + " more tokens]"));
  return nodes;
}

// A newline is shown as a symbol, so that it can be coloured.
const visible = (text) => text.split("\n").flatMap((part, i) => (i ? [el("i", {}, "\u21b5"), "\n", part] : [part]));

const reach = (episode) => Math.max(1e-9, ...episode.turns.flatMap((turn) => turn.advantages || []).map(Math.abs));
const tint = (name, strength) => "color-mix(in srgb, var(" + name + ") " + Math.round(70 * Math.min(1, strength)) + "%, transparent)";

function backgroundOf(log_prob, advantage, span) {
  if (browser.colouring === "log-prob") return tint("--s1", -log_prob / 5);
  if (browser.colouring === "advantage" && advantage) return tint(advantage > 0 ? "--s2" : "--s4", Math.abs(advantage) / span);
  return null;
}

function scaleOf(learned, span) {
  const ramp = el("span", { class: "ramp" });
  if (browser.colouring === "log-prob") {
    ramp.style.background = "linear-gradient(to right, " + tint("--s1", 0) + ", " + tint("--s1", 1) + ")";
    return ["certain", ramp, "log-prob " + MINUS + "5 or less"];
  }
  if (browser.colouring !== "advantage") return [];
  if (!learned) return ["this episode was not trained on"];
  ramp.style.background = "linear-gradient(to right, " + tint("--s4", 1) + ", transparent, " + tint("--s2", 1) + ")";
  return [number(-span), ramp, number(span)];
}
