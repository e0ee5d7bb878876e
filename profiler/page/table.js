"use strict";
// Tables whose rows are sorted by a click on a title, searched for words, and filtered by what stands in a column;
// and maps of ranks, of which two that are clicked are compared.
(() => {
  const LEAST_ROWS = 8, MOST_CHOICES = 16;
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

  function narrow(body, words, chosen, told) {
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      const fits = chosen.every(([column, value]) => row.cells[column].textContent === value);
      row.hidden = !(fits && words.every((word) => text.includes(word)));
      shown += !row.hidden;
    }
    told.textContent = words.length || chosen.length ? `${shown} of ${body.rows.length} rows` : "";
  }

  // A list to choose from, of columns of few texts: the kind of a kernel, the rank, what changed.
  function choices(body, titles, onchange) {
    const lists = [];
    titles.forEach((title, column) => {
      if (!title.classList.contains("text") && title.textContent !== "rank") return;
      const values = [...new Set([...body.rows].map((row) => row.cells[column].textContent))];
      if (values.length < 2 || values.length > MOST_CHOICES || 2 * values.length > body.rows.length) return;
      const list = document.createElement("select");
      list.setAttribute("aria-label", `rows of one ${title.textContent}`);
      list.append(new Option(`${title.textContent}: all`, ""), ...values.map((value) => new Option(value || "(none)", "=" + value)));
      list.addEventListener("change", onchange);
      lists.push([column, list]);
    });
    return lists;
  }

  for (const table of document.querySelectorAll("table.answer")) {
    const body = table.tBodies[0], titles = [...table.tHead.rows[0].cells];
    body.addEventListener("click", (event) => {
      const cell = event.target.closest("td[title]");
      if (cell && !String(getSelection())) cell.classList.toggle("whole");
    });
    if (body.rows.length >= LEAST_ROWS) {
      const bar = document.createElement("div"), box = document.createElement("input"), told = document.createElement("span");
      const change = () => narrow(
        body, box.value.toLowerCase().split(/\s+/).filter(Boolean),
        lists.filter(([, list]) => list.value).map(([column, list]) => [column, list.value.slice(1)]), told);
      const lists = choices(body, titles, change);
      bar.className = "search";
      box.type = "search";
      box.placeholder = "search: kernel, module, shape, ...";
      box.setAttribute("aria-label", "rows that have all these words");
      box.addEventListener("input", change);
      bar.append(box, ...lists.map(([, list]) => list), told);
      table.parentElement.before(bar);
    }
    titles.forEach((title, column) => {
      const button = document.createElement("button");
      button.textContent = title.textContent;
      button.addEventListener("click", () => sort(body, titles, column));
      title.replaceChildren(button);
    });
  }

  const time = (us) => {
    const [unit, by] = [["s", 1e6], ["ms", 1e3], ["us", 1]].find(([, by]) => Math.abs(us) >= by) || ["us", 1];
    return `${us > 0 ? "+" : ""}${(us / by).toFixed(2)} ${unit}`;
  };

  for (const table of document.querySelectorAll("table.compare")) {
    const rows = [...table.rows].slice(1), foot = table.createTFoot().insertRow();
    let chosen = [];
    foot.hidden = true;
    const show = () => {
      for (const row of rows) row.querySelector("button").setAttribute("aria-pressed", String(chosen.includes(row)));
      foot.hidden = chosen.length < 2;
      if (foot.hidden) return;
      const [one, other] = chosen, head = document.createElement("th");
      head.className = "text";
      head.textContent = `${other.cells[0].textContent} less ${one.cells[0].textContent}`;
      foot.replaceChildren(head);
      for (let at = 1; at < one.cells.length; at++)
        foot.insertCell().textContent = time(other.cells[at].dataset.value - one.cells[at].dataset.value);
    };
    for (const row of rows) {
      const button = document.createElement("button");
      button.textContent = row.cells[0].textContent;
      // The last two that were clicked; a second click lets go.
      button.addEventListener("click", () => {
        chosen = chosen.includes(row) ? chosen.filter((other) => other !== row) : [...chosen.slice(-1), row];
        show();
      });
      row.cells[0].replaceChildren(button);
    }
    if (rows.length > 1) show();
  }
})();
