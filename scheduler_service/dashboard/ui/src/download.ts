/** What is shown, as a file. */

export type Cell = string | number | boolean | null | undefined;

/** RFC 4180: quoted where needed, lines end in CR LF. */
export function csv(header: readonly string[], rows: Iterable<readonly Cell[]>): string {
  const field = (cell: Cell): string => {
    const text = cell === null || cell === undefined ? "" : String(cell);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [header.map(field).join(",")];
  for (const row of rows) lines.push(row.map(field).join(","));
  return `${lines.join("\r\n")}\r\n`;
}

function save(name: string, type: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function saveCsv(name: string, header: readonly string[], rows: Iterable<readonly Cell[]>): void {
  save(`${name}.csv`, "text/csv", csv(header, rows));
}

export function saveJson(name: string, value: unknown): void {
  save(`${name}.json`, "application/json", `${JSON.stringify(value, null, 2)}\n`);
}
