/** Key figures: a number, what it means, and how it went. */

export interface Figure {
  label: string;
  value: string;
  note?: string;
  /** How it went, oldest first. */
  trend?: readonly (number | null)[];
  tone?: "good" | "warn" | "plain";
}

export function Figures({ label, figures }: { label: string; figures: readonly Figure[] }) {
  return (
    <dl class="figures" aria-label={label}>
      {figures.map((figure) => (
        <div key={figure.label} class={`figure ${figure.tone ?? "plain"}`}>
          <dt>{figure.label}</dt>
          <dd class="value">{figure.value}</dd>
          {figure.note && <dd class="note">{figure.note}</dd>}
          {figure.trend && <Sparkline values={figure.trend} />}
        </div>
      ))}
    </dl>
  );
}

/** Decoration beside the number; the charts below have the values. */
function Sparkline({ values }: { values: readonly (number | null)[] }) {
  const known = values.flatMap((value, index) => (value === null ? [] : [[index, value] as const]));
  if (known.length < 3) return null;
  const numbers = known.map(([, value]) => value);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const points = known.map(([index, value]) => {
    const x = (index / (values.length - 1)) * 100;
    const y = high > low ? 22 - ((value - low) / (high - low)) * 20 : 12;
    return `${x.toFixed(2)},${y.toFixed(2)}`;
  });
  return (
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
      <polyline points={points.join(" ")} fill="none" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
