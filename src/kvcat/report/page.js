// Sorts a table by the column whose heading is chosen. The page needs none of this to be read.
"use strict";

function sortKey(row, column) {
  const cell = row.cells[column];
  const number = Number.parseFloat(cell.dataset.value ?? cell.textContent);
  return Number.isNaN(number) ? cell.textContent.trim() : number;
}

// Texts, such as the mark of a missing figure, stay behind numbers in both directions.
function compareKeys(first, second, sign) {
  if (typeof first !== typeof second) return typeof first === "number" ? -1 : 1;
  return sign * (typeof first === "number" ? first - second : first.localeCompare(second));
}

function sortTable(table, column, sign) {
  const rows = [...table.tBodies[0].rows];
  const keys = new Map(rows.map((row) => [row, sortKey(row, column)]));
  rows.sort((a, b) => compareKeys(keys.get(a), keys.get(b), sign));
  table.classList.add("sorted");
  table.tBodies[0].append(...rows);
  [...table.tHead.rows[0].cells].forEach((heading, index) => {
    const direction = sign > 0 ? "ascending" : "descending";
    heading.setAttribute("aria-sort", index === column ? direction : "none");
  });
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.title = "Sort by this column";
    button.addEventListener("click", () => {
      const isAscending = heading.getAttribute("aria-sort") === "ascending";
      sortTable(table, column, isAscending ? -1 : 1);
    });
    heading.append(button);
  });
}
