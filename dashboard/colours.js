// Colours of SQL, painted behind the text area, whose own letters are transparent meanwhile. The text
// area stays what is edited: without this script, or if it fails, its text is there in one colour.

const TOKEN = new RegExp([
  String.raw`(?<comment>--[^\n]*|\/\*[\s\S]*?(?:\*\/|$))`,
  String.raw`(?<string>'(?:[^']|'')*'?)`,
  String.raw`(?<name>"(?:[^"]|"")*"?)`,
  String.raw`(?<parameter>\$\w+)`,
  String.raw`(?<number>\b\d+(?:\.\d*)?(?:e[+-]?\d+)?\b)`,
  String.raw`(?<word>[a-z_]\w*)`,
].join("|"), "gi");
const MOST = 20000; // characters; a longer text keeps one colour
const LOOK = 100; // ms between looks at a text that something else than typing may have changed
const COPIED = ["fontFamily", "fontSize", "fontWeight", "letterSpacing", "lineHeight", "tabSize", "textAlign",
  "paddingTop", "paddingRight", "paddingBottom", "paddingLeft"];

/** [[kind, text], …], which joined are the text; kind "" has no colour. */
export function tokens(text, keywords) {
  const found = [];
  let end = 0;
  for (const m of text.matchAll(TOKEN)) {
    if (m.index > end) found.push(["", text.slice(end, m.index)]);
    end = m.index + m[0].length;
    let kind = Object.keys(m.groups).find((name) => m.groups[name] !== undefined);
    if (kind === "word") {
      const call = /^\s*\(/.test(text.slice(end, end + 100));
      kind = keywords.has(m[0].toUpperCase()) ? "keyword" : call ? "function" : "";
    }
    found.push([kind, m[0]]);
  }
  if (end < text.length) found.push(["", text.slice(end)]);
  return found;
}

export default function ({ parentElement, data }) {
  const keywords = new Set(data.keywords.flatMap((words) => words.split(" ")));
  const theme = getComputedStyle(parentElement.host ?? parentElement);
  const paper = document.createElement("div");
  paper.setAttribute("aria-hidden", "true");
  Object.assign(paper.style, {
    position: "absolute", overflow: "hidden", pointerEvents: "none", whiteSpace: "pre-wrap",
    overflowWrap: "break-word", boxSizing: "border-box",
  });
  paper.dataset.colours = "";
  let area = null, painted = null;

  function leave() {
    if (area) area.style.removeProperty("-webkit-text-fill-color");
    paper.remove();
    area = painted = null;
  }

  function paint() {
    const text = area.value;
    if (text.length > MOST) return leave();
    const style = getComputedStyle(area);
    const place = [area.offsetLeft, area.offsetTop, area.offsetWidth, area.clientWidth, area.clientHeight];
    const seen = [text, style.fontSize, style.fontFamily, style.color, ...place].join("\n");
    if (seen !== painted) {
      painted = seen;
      for (const name of COPIED) paper.style[name] = style[name];
      Object.assign(paper.style, {
        left: `${area.offsetLeft + area.clientLeft}px`, top: `${area.offsetTop + area.clientTop}px`,
        width: `${area.clientWidth}px`, height: `${area.clientHeight}px`, color: style.color,
      });
      paper.replaceChildren(...tokens(text, keywords).map(([kind, part]) => {
        if (!kind) return part;
        const span = document.createElement("span");
        span.style.color = theme.getPropertyValue(data.colours[kind]) || style.color;
        span.textContent = part;
        return span;
      }), "\n\n"); // so that it scrolls as far as the text area
    }
    paper.scrollTop = area.scrollTop;
  }

  function look() {
    const now = document.querySelector(data.selector);
    if (now !== area || (area && !paper.isConnected)) {
      leave();
      if (!now || now.value.length > MOST) return;
      area = now;
      const home = area.parentElement;
      if (getComputedStyle(home).position === "static") home.style.position = "relative";
      home.append(paper);
      // Not `color`: the caret and the selection keep theirs.
      area.style.setProperty("-webkit-text-fill-color", "transparent");
    }
    if (area) paint();
  }

  const onEvent = (event) => { if (event.target === area) paint(); };
  const heard = ["input", "scroll"];
  for (const name of heard) document.addEventListener(name, onEvent, true);
  const timer = setInterval(look, LOOK);
  look();
  return () => {
    clearInterval(timer);
    for (const name of heard) document.removeEventListener(name, onEvent, true);
    leave();
  };
}
