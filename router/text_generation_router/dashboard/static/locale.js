// Loads before the charting library, which does not start with a language that Intl refuses: Chromium has one with LANG=C.

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en", configurable: true });
}
