for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const value = (text) => (text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text));
      const rows = [...body.rows];
      rows.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const [m, n] = [value(x), value(y)];
        const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m === n ? 0 : m - n;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
