"use strict";
// Tables whose rows are sorted by a click on a title, and searched for words.
(() => {
  const LEAST_ROWS = 8;
  const number = (text) => (/^[-\d.,]+(e[-+]?\d+)?$/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN);

  function sort(body, titles, column) {
    const down = titles[column].getAttribute("aria-sort") === "descending";
    const text = (row) => row.cells[column].textContent;
    const numbers = body.rows.length && [...body.rows].some((row) => !Number.isNaN(number(text(row))));
    // What has no value is last either way; numbers begin with the largest, texts with the first.
    const rows = [...body.rows].map((row) => [numbers ? number(text(row)) : text(row), row]);
    const up = numbers ? down : !titles[column].hasAttribute("aria-sort") || down;
    rows.sort(([a], [b]) => {
      if (numbers && (Number.isNaN(a) || Number.isNaN(b))) return Number.isNaN(a) - Number.isNaN(b);
      return (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
    });
    body.append(...rows.map(([, row]) => row));
    for (const title of titles) title.removeAttribute("aria-sort");
    titles[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  }

  function searched(body, words, told) {
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    told.textContent = words.length ? `${shown} of ${body.rows.length} rows` : "";
  }

  for (const table of document.querySelectorAll("table.answer")) {
    const body = table.tBodies[0], titles = [...table.tHead.rows[0].cells];
    titles.forEach((title, column) => {
      const button = document.createElement("button");
      button.textContent = title.textContent;
      button.addEventListener("click", () => sort(body, titles, column));
      title.replaceChildren(button);
    });
    if (body.rows.length < LEAST_ROWS) continue;
    const bar = document.createElement("div"), box = document.createElement("input"), told = document.createElement("span");
    bar.className = "search";
    box.type = "search";
    box.placeholder = "search: kernel, module, shape, ...";
    box.setAttribute("aria-label", "rows that have all these words");
    box.addEventListener("input", () => searched(body, box.value.toLowerCase().split(/\s+/).filter(Boolean), told));
    bar.append(box, told);
    table.parentElement.before(bar);
  }
})();
