// One script and one style sheet, which fedkin.report embeds in its pages.
import { defineConfig } from "vite";

export default defineConfig({
  build: {
    outDir: process.env.FEDKIN_BUNDLE ?? "../src/fedkin/report/static",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    rollupOptions: {
      input: "src/main.ts",
      output: { format: "iife", entryFileNames: "fedkin.js", assetFileNames: "fedkin.[ext]" },
    },
  },
});
