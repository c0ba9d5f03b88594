/** Light and dark, and the colours that are drawn on a canvas. All scales are safe for colour-blind readers. */

import { useEffect, useState } from "preact/hooks";

export type ThemeChoice = "system" | "light" | "dark";
export type Rgb = readonly [number, number, number];

export interface Palette {
  dark: boolean;
  surface: string;
  text: string;
  muted: string;
  line: string;
  idle: string;
  /** Okabe and Ito's colours, shifted for the background: "Color Universal Design", 2008. */
  blue: string;
  orange: string;
  green: string;
  purple: string;
  grey: string;
  forward: string;
  backward: string;
  /** From little to much: one hue, monotone in lightness. */
  ramp: readonly Rgb[];
}

const LIGHT: Palette = {
  dark: false,
  surface: "#ffffff",
  text: "#161a20",
  muted: "#5c6570",
  line: "#e4e7eb",
  idle: "#f1f3f5",
  blue: "#0072b2",
  orange: "#d55e00",
  green: "#008f68",
  purple: "#b05a8c",
  grey: "#79828d",
  forward: "#4b9cd3",
  backward: "#e6a04b",
  ramp: [[233, 241, 248], [168, 205, 231], [88, 155, 206], [27, 103, 168], [8, 48, 107]],
};

const DARK: Palette = {
  dark: true,
  surface: "#15191f",
  text: "#e8ebef",
  muted: "#9ba5b1",
  line: "#272d36",
  idle: "#1b2027",
  blue: "#56b4e9",
  orange: "#f08a3c",
  green: "#2bbf93",
  purple: "#d98fb9",
  grey: "#8a94a0",
  forward: "#3f8fc9",
  backward: "#c98638",
  ramp: [[27, 40, 55], [27, 72, 113], [34, 110, 170], [74, 156, 219], [166, 213, 252]],
};

/** Degree 1, 2, 4, …: viridis (van der Walt and Smith, 2015), from its light end so that rare large degrees stand out. */
const DEGREES: readonly Rgb[] = [
  [199, 224, 32],
  [111, 206, 87],
  [53, 183, 121],
  [33, 144, 141],
  [44, 114, 142],
  [59, 82, 139],
  [71, 44, 122],
  [68, 1, 84],
];
const DEGREES_DARK: readonly Rgb[] = [
  [72, 45, 123],
  [65, 73, 141],
  [53, 102, 141],
  [40, 130, 142],
  [31, 160, 136],
  [74, 193, 109],
  [159, 217, 56],
  [243, 230, 37],
];

const KEY = "hydracp-theme";

function stored(): ThemeChoice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // storage can be forbidden
  }
}

function systemIsDark(): boolean {
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

export function useTheme(): { choice: ThemeChoice; palette: Palette; choose: (choice: ThemeChoice) => void } {
  const [choice, setChoice] = useState<ThemeChoice>(stored);
  const [system, setSystem] = useState(systemIsDark);
  useEffect(() => {
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const update = () => setSystem(media.matches);
    media.addEventListener("change", update);
    return () => media.removeEventListener("change", update);
  }, []);
  const dark = choice === "dark" || (choice === "system" && system);
  useEffect(() => {
    document.documentElement.dataset["theme"] = dark ? "dark" : "light";
  }, [dark]);
  const choose = (next: ThemeChoice) => {
    setChoice(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // the choice then lasts as long as the page
    }
  };
  return { choice, palette: dark ? DARK : LIGHT, choose };
}

export function rgb([r, g, b]: Rgb): string {
  return `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;
}

/** Colour of a share between 0 and 1. */
export function rampColour(palette: Palette, share: number): Rgb {
  const position = Math.min(1, Math.max(0, share)) * (palette.ramp.length - 1);
  const index = Math.min(palette.ramp.length - 2, Math.floor(position));
  const [from, to] = [palette.ramp[index]!, palette.ramp[index + 1]!];
  const part = position - index;
  return [0, 1, 2].map((k) => from[k]! + (to[k]! - from[k]!) * part) as unknown as Rgb;
}

/** Colour of a degree when the largest that occurs is `top`. */
export function degreeColour(palette: Palette, degree: number, top: number): Rgb {
  const scale = palette.dark ? DEGREES_DARK : DEGREES;
  const steps = Math.log2(Math.max(2, top));
  const position = Math.round((Math.log2(Math.max(1, degree)) / Math.max(steps, 3)) * (scale.length - 1));
  return scale[Math.min(scale.length - 1, position)]!;
}

/** Black or white, whichever reads better on `colour` (relative luminance of WCAG 2). */
export function inkOn(colour: Rgb): string {
  const [r, g, b] = colour.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * r! + 0.7152 * g! + 0.0722 * b!;
  return luminance > 0.18 ? "#10141a" : "#ffffff";
}
