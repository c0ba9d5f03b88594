/** What every part of a page may need: the view that is shown, the colours, and whether something is new. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Live } from "../live";
import type { Route } from "../router";
import type { Palette } from "../theme";

export interface View {
  route: Route;
  palette: Palette;
  live: Live;
}

export const ViewContext = createContext<View | null>(null);

export function useView(): View {
  const view = useContext(ViewContext);
  if (view === null) throw new Error("useView outside of the application");
  return view;
}
