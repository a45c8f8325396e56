// Diagnostics, and how to reproduce the fit.
import type { Model } from "./data";
import { el, section } from "./dom";

const SIGNS = { good: "✓", fair: "!", bad: "×" };
const SAID = { good: "good", fair: "caution", bad: "problem" };

export function trustSection(model: Model): HTMLElement {
  const items = model.payload.trust.map((one) =>
    el(
      "li",
      { class: one.tone },
      el("span", { class: "sign", role: "img", "aria-label": SAID[one.tone] }, SIGNS[one.tone]),
      el("div", {}, el("h3", {}, one.title), el("p", {}, one.words)),
    ),
  );
  return section("trust", "Diagnostics", "", el("ul", { class: "trust" }, ...items));
}

export function reproduceSection(model: Model): HTMLElement {
  const { facts, command, options } = model.payload.reproduction;
  const list = el("dl", { class: "facts" });
  for (const [name, value] of Object.entries(facts)) list.append(el("dt", {}, name), el("dd", {}, value));
  const table = el("dl", { class: "facts" });
  for (const [name, value] of Object.entries(options)) table.append(el("dt", {}, name), el("dd", {}, value));
  return section(
    "reproduce",
    "Reproduce this fit",
    "The same rows, options and seed give the same model.",
    command ? codeBlock(command) : null,
    list,
    Object.keys(options).length
      ? el("details", { class: "more" }, el("summary", {}, "All options of the fit"), table)
      : null,
  );
}

/** A command with a button that copies it. */
export function codeBlock(command: string): HTMLElement {
  const button = el("button", { type: "button", class: "copy" }, "Copy");
  const code = el("code", {}, command);
  button.addEventListener("click", () => {
    const done = (): void => {
      button.textContent = "Copied";
      window.setTimeout(() => {
        button.textContent = "Copy";
      }, 1500);
    };
    if (navigator.clipboard) navigator.clipboard.writeText(command).then(done, () => select(code));
    else select(code);
  });
  return el(
    "div",
    { class: "command" },
    el("pre", { tabindex: 0, role: "region", "aria-label": "Command" }, code),
    button,
  );
}

function select(element: HTMLElement): void {
  const selection = window.getSelection();
  selection?.removeAllRanges();
  const range = document.createRange();
  range.selectNodeContents(element);
  selection?.addRange(range);
}
