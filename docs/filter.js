// A field above each long table: empty it shows the first rows, else those that have all of its words.
const LONG = 100;
const SHOWN = 30;

document.querySelectorAll("article table").forEach((table) => {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < LONG) return;
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = `Filter ${rows.length} rows; ${SHOWN} are shown`;
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, number) => {
      const text = row.textContent.toLowerCase();
      row.hidden = words.length ? !words.every((word) => text.includes(word)) : number >= SHOWN;
    });
  };
  field.addEventListener("input", show);
  table.before(field);
  show();
});
