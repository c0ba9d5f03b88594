/** Numbers in words of their units. Missing values are an en dash. */

export const MISSING = "–";
const THIN = "\u202f";

type Maybe = number | null | undefined;

function missing(value: Maybe): value is null | undefined {
  return value === null || value === undefined || !Number.isFinite(value);
}

/** Three digits. `round` leaves out zeros at the end, as the labels of an axis should. */
function digits(value: number, round: boolean): string {
  const whole = Math.max(1, Math.floor(Math.log10(Math.abs(value) || 1) + 1e-9) + 1);
  const fraction = Math.max(0, 3 - whole);
  return value.toLocaleString("en", {
    minimumFractionDigits: round ? 0 : fraction,
    maximumFractionDigits: fraction,
  });
}

/** Seconds: 1.24 s, 84.0 ms, 620 µs, 4 min 12 s. */
export function seconds(value: Maybe, round = false): string {
  if (missing(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return `0${THIN}s`;
  if (size >= 120) return `${Math.trunc(value / 60)}${THIN}min ${Math.round(size % 60)}${THIN}s`;
  if (size >= 0.9995) return `${digits(value, round)}${THIN}s`;
  if (size >= 0.9995e-3) return `${digits(value * 1e3, round)}${THIN}ms`;
  if (size >= 0.9995e-6) return `${digits(value * 1e6, round)}${THIN}µs`;
  return `<${THIN}1${THIN}µs`;
}

/** A whole number with thousands separators. */
export function integer(value: Maybe): string {
  return missing(value) ? MISSING : Math.round(value).toLocaleString("en");
}

/** A large number, short: 3.14 M. */
export function short(value: Maybe): string {
  if (missing(value)) return MISSING;
  const size = Math.abs(value);
  for (const [unit, scale] of [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]] as const) {
    if (size >= scale) return `${digits(value / (unit === "k" ? 1e3 : scale), false)}${THIN}${unit}`;
  }
  return digits(value, true);
}

export function percent(value: Maybe, fraction = 1): string {
  if (missing(value)) return MISSING;
  const shown = Number((value * 100).toFixed(fraction)) || 0; // no −0
  const text = shown.toLocaleString("en", { minimumFractionDigits: fraction, maximumFractionDigits: fraction });
  return `${text}${THIN}%`;
}

/** A difference: +3.1 %, −0.4 %. */
export function signedPercent(value: Maybe, fraction = 1): string {
  if (missing(value)) return MISSING;
  const text = percent(Math.abs(value), fraction);
  return `${value < 0 ? "−" : "+"}${text}`;
}

export function times(value: Maybe): string {
  if (missing(value)) return MISSING;
  return `${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}×`;
}

export function decimal(value: Maybe, fraction = 3): string {
  if (missing(value)) return MISSING;
  return value.toLocaleString("en", { minimumFractionDigits: fraction, maximumFractionDigits: fraction });
}

/** Ranks of a group: 12, or 12–15. */
export function rankRange(start: number, degree: number): string {
  return degree > 1 ? `${integer(start)}–${integer(start + degree - 1)}` : integer(start);
}

/** The same with its noun: rank 12, or ranks 12–15. */
export function groupRanks(start: number, degree: number): string {
  return `${degree > 1 ? "ranks" : "rank"} ${rankRange(start, degree)}`;
}

/** How long ago a Unix time was. */
export function ago(at: number, now = Date.now() / 1000): string {
  const age = Math.max(0, now - at);
  if (age < 5) return "just now";
  if (age < 90) return `${Math.round(age)}${THIN}s ago`;
  if (age < 5400) return `${Math.round(age / 60)}${THIN}min ago`;
  if (age < 129600) return `${Math.round(age / 3600)}${THIN}h ago`;
  return `${Math.round(age / 86400)}${THIN}days ago`;
}

export function clock(at: number): string {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${integer(count)} ${count === 1 ? one : many}`;
}

/** The middle of the values that are there, or null. */
export function median(values: readonly Maybe[]): number | null {
  const known = values.filter((v): v is number => !missing(v)).sort((a, b) => a - b);
  if (known.length === 0) return null;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle]! : (known[middle - 1]! + known[middle]!) / 2;
}

export function largest(values: readonly Maybe[]): number | null {
  return values.reduce<number | null>((top, v) => (missing(v) || (top !== null && top >= v) ? top : v), null);
}
