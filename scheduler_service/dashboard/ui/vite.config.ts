import { defineConfig } from "vite";

// Relative base: the same files work at the root of a host and behind a path prefix.
export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    // ECharts is one dependency of half a megabyte; it has a file of its own so that it stays cached.
    chunkSizeWarningLimit: 700,
    rollupOptions: { output: { manualChunks: { echarts: ["./src/echarts.ts"] } } },
  },
  server: { proxy: { "/api": "http://127.0.0.1:7422" } },
});
