// A list of completions that follows the caret of the SQL text area. The text area is Streamlit's own:
// this only writes what is chosen into it, as if typed, so that undo and its state stay its own.

const TOKEN = /'(?:[^']|'')*('?)|"(?:[^"]|"")*("?)|--[^\n]*(\n?)|\/\*[\s\S]*?(\*\/|$)/g;
const NAME = String.raw`(?:"[^"\n]*"|\w+)`;
const OWNER = new RegExp(String.raw`(${NAME})\s*\.\s*$`);
const FROM = new RegExp(
  String.raw`\b(?:from|join)\s+(${NAME}(?:\s*\.\s*${NAME})?)(?:\s+as\b)?(?:\s+(\w+))?`, "gi");
const NOT_ALIAS = /^(?:where|join|left|right|full|inner|cross|asof|on|using|group|order|limit|qualify|union|having)$/i;
const SOME = 50;

const bare = (name) => name.replace(/^"|"$/g, "").toLowerCase();
const quoted = (name) => (/^[a-z_]\w*$/i.test(name) ? name : `"${name.replaceAll('"', '""')}"`);

/** What the caret stands in: code, or an open string, name or comment, and where that begins. */
export function place(before) {
  let open = { kind: "code", start: 0 };
  for (const m of before.matchAll(TOKEN)) {
    if (m.index + m[0].length < before.length || m[1] || m[2] || m[3] || m[4]) continue;
    const kind = { "'": "string", '"': "name" }[m[0][0]] ?? "comment";
    open = { kind, start: m.index };
  }
  return open;
}

/** Alias or name, in lower case → table of `words.tables`. */
function tablesOf(text, words) {
  const code = text.replace(TOKEN, (token) => (token[0] === '"' ? token : " "));
  const found = new Map();
  for (const [, name, alias] of code.matchAll(FROM)) {
    const parts = (name.match(new RegExp(NAME, "g")) ?? []).map(bare);
    const table = words.tables.find((t) => t.name.split(/\.(?=\w+$)/).map(bare).join() === parts.join());
    if (!table) continue;
    found.set(parts.at(-1), table);
    if (alias && !NOT_ALIAS.test(alias)) found.set(alias.toLowerCase(), table);
  }
  return found;
}

const columnsOf = (table) =>
  table.columns.map((c) => ({ label: c.name, insert: quoted(c.name), detail: c.type }));

function afterDot(owner, text, words) {
  const found = tablesOf(text, words);
  if (found.has(owner)) return columnsOf(found.get(owner));
  const dataset = words.tables.filter((t) => t.name.includes(".") && bare(t.name.split(".")[0]) === owner);
  if (words.datasets.some((d) => d.toLowerCase() === owner) || dataset.length)
    return [{ label: "steps", insert: "steps", detail: "table" }];
  const known = words.tables.find((t) => bare(t.name) === owner);
  if (known) return columnsOf(known);
  const tables = found.size ? [...found.values()] : words.tables;
  const struct = tables.flatMap((t) => t.columns).find((c) => bare(c.name) === owner && c.fields.length);
  return (struct?.fields ?? []).map((f) => ({ label: f.name, insert: quoted(f.name), detail: f.type }));
}

function tables(words) {
  const known = words.tables.map((t) => ({ label: t.name, insert: t.name, detail: "table" }));
  const rest = words.datasets.map((d) => `"${d}".steps`).filter((n) => !known.some((k) => k.label === n));
  return [...known, ...rest.map((n) => ({ label: n, insert: n, detail: "table" }))];
}

function anywhere(text, words, typed) {
  const found = tablesOf(text, words);
  const first = found.size ? [...new Set(found.values())] : words.tables.slice(0, 1);
  const lower = typed !== "" && typed === typed.toLowerCase();
  const keyword = (k) => ({ label: lower ? k.toLowerCase() : k, insert: lower ? k.toLowerCase() : k, detail: "" });
  return [
    ...first.flatMap(columnsOf),
    ...[...found.keys()].map((name) => ({ label: name, insert: quoted(name), detail: "alias" })),
    ...words.keywords.map(keyword),
    ...words.functions.map((f) => ({ label: f, insert: `${f}(`, detail: "function" })),
    ...tables(words),
  ];
}

/** {from, items}: what may stand at the caret instead of text[from, caret). */
export function complete(text, caret, words, asked = false) {
  const before = text.slice(0, caret);
  const { kind, start } = place(before);
  if (kind === "comment") return { from: caret, items: [] };
  if (kind === "string") {
    const isDataset = /\bdataset\s*(?:=|<>|!=|in\s*\([^()]*)\s*$/i.test(before.slice(0, start));
    const all = words.datasets.map((d) => ({ label: d, insert: `'${d}'`, detail: "dataset" }));
    return { from: start, items: isDataset ? matching(all, before.slice(start + 1), text.slice(caret)) : [] };
  }
  // Names of datasets have dashes, and are often begun without their quote.
  const table = before.match(/\b(?:from|join)\s+([\w-]*)$/i);
  const word = kind === "name" ? before.slice(start) : table ? table[1] : before.match(/[\w$]*$/)[0];
  const from = caret - word.length;
  const typed = word.replace(/^"/, "");
  const owner = before.slice(0, from).match(OWNER);
  const begun = owner || table || kind === "name" || typed !== "" || asked;
  if (!begun || (!table && /^[\d$]/.test(typed))) return { from, items: [] };
  let all;
  if (owner) all = afterDot(bare(owner[1]), text, words);
  else if (table || /\b(?:from|join)\s+$/i.test(before.slice(0, from))) all = tables(words);
  else all = anywhere(text, words, typed);
  if (kind === "name")
    all = all.filter((i) => i.detail !== "function" && i.detail !== "").map((i) => (
      i.insert.startsWith('"') ? i : { ...i, insert: `"${i.insert}"` }));
  return { from, items: matching(all, typed, text.slice(caret)) };
}

function matching(all, typed, after) {
  const low = typed.toLowerCase();
  const seen = new Set();
  const score = ({ label }) => {
    const name = label.replace(/^"/, "").toLowerCase();
    return name.startsWith(low) ? 0 : typed.length > 2 && name.includes(low) ? 1 : 2;
  };
  return all
    .map((item) => ({ item, score: score(item) }))
    .filter(({ item, score }) => score < 2 && !seen.has(item.label) && seen.add(item.label))
    .sort((a, b) => a.score - b.score)
    .slice(0, SOME)
    .map(({ item }) => {
      // The quote that a browser or a person has closed already is not written twice.
      const last = item.insert.at(-1);
      return "'\"".includes(last) && after[0] === last ? { ...item, insert: item.insert.slice(0, -1) } : item;
    });
}

/** Where the caret is drawn, in pixels of the window, by a copy of the text area's text. */
function caretAt(area) {
  const copy = document.createElement("div");
  const style = getComputedStyle(area);
  for (const name of ["font", "letterSpacing", "lineHeight", "padding", "border", "tabSize", "boxSizing"])
    copy.style[name] = style[name];
  Object.assign(copy.style, {
    position: "absolute", visibility: "hidden", whiteSpace: "pre-wrap", overflowWrap: "break-word",
    width: `${area.clientWidth}px`,
  });
  const mark = document.createElement("span");
  mark.textContent = "|";
  copy.append(area.value.slice(0, area.selectionStart), mark);
  document.body.append(copy);
  const box = area.getBoundingClientRect();
  const at = {
    left: box.left + mark.offsetLeft, top: box.top + mark.offsetTop - area.scrollTop, height: mark.offsetHeight,
  };
  copy.remove();
  return at;
}

export default function ({ parentElement, data }) {
  const list = parentElement.querySelector("[role=listbox]");
  const mine = (event) => event.target instanceof Element && event.target.matches(data.selector);
  let items = [], from = 0, chosen = -1, area = null;

  const isOpen = () => list.matches(":popover-open");
  const close = () => { if (isOpen()) list.hidePopover(); };

  function mark(index) {
    chosen = index;
    [...list.children].forEach((row, i) => row.setAttribute("aria-selected", i === index));
    list.children[index]?.scrollIntoView({ block: "nearest" });
  }

  function show(target, asked) {
    area = target;
    if (area.selectionStart !== area.selectionEnd) return close();
    ({ from, items } = complete(area.value, area.selectionStart, data.words, asked));
    const typed = area.value.slice(from, area.selectionStart).toLowerCase();
    const exact = items.some((i) => i.insert.toLowerCase() === typed || i.label.toLowerCase() === typed);
    if (!items.length || (exact && items.length === 1)) return close();
    list.replaceChildren(...items.map((item, i) => {
      const row = document.createElement("div");
      row.setAttribute("role", "option");
      const detail = document.createElement("small");
      detail.textContent = item.detail.length > 24 ? `${item.detail.slice(0, 23)}…` : item.detail;
      row.append(item.label, detail);
      row.onpointerdown = (event) => { event.preventDefault(); accept(i); };
      return row;
    }));
    if (!isOpen()) list.showPopover();
    const at = caretAt(area);
    const below = at.top + at.height + 2;
    const fits = below + list.offsetHeight < innerHeight || at.top < list.offsetHeight;
    list.style.top = `${fits ? below : at.top - list.offsetHeight - 2}px`;
    list.style.left = `${Math.max(4, Math.min(at.left, innerWidth - list.offsetWidth - 4))}px`;
    // Enter after a whole word is a new line, not another word.
    mark(exact ? -1 : 0);
  }

  function accept(index) {
    const { insert } = items[index];
    close();
    area.focus();
    area.setSelectionRange(from, area.selectionStart);
    document.execCommand("insertText", false, insert); // keeps undo, and React hears of it
    close();
  }

  function onInput(event) {
    if (mine(event) && event.inputType !== "historyUndo") show(event.target, false);
  }

  function onKey(event) {
    if (!mine(event)) return;
    const command = event.ctrlKey || event.metaKey;
    if (command && event.code === "Space") {
      show(event.target, true);
    } else if (!isOpen() || (command && event.key !== "Enter")) {
      return;
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const step = event.key === "ArrowDown" ? 1 : -1;
      mark((Math.max(chosen, step < 0 ? 0 : -1) + step + items.length) % items.length);
    } else if ((event.key === "Tab" || event.key === "Enter") && !command && chosen >= 0) {
      accept(chosen);
    } else {
      // Escape stays here; any other key is the text area's.
      if (["Escape", "Enter", "ArrowLeft", "ArrowRight", "Home", "End", "Tab"].includes(event.key)) close();
      if (event.key !== "Escape") return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  const onLeave = (event) => { if (mine(event)) close(); };
  const onFocus = (event) => { if (mine(event)) event.target.spellcheck = false; };
  const heard = [["input", onInput], ["keydown", onKey], ["focusout", onLeave], ["focusin", onFocus],
    ["scroll", close], ["pointerdown", onLeave]];
  for (const [name, listener] of heard) document.addEventListener(name, listener, true);
  return () => {
    close();
    for (const [name, listener] of heard) document.removeEventListener(name, listener, true);
  };
}
