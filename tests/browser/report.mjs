// Open a page in a real browser: node report.mjs PACKAGES FILE WIDTH light|dark SCREENSHOT. Prints the findings as JSON.
import { createRequire } from "node:module";

const [packages, file, width, colorScheme, screenshot] = process.argv.slice(2);
const require = createRequire(packages + "/");
const { chromium } = require("playwright-core");
const { default: Chromium } = await import(require.resolve("@sparticuz/chromium"));
Chromium.setGraphicsMode = false;

const browser = await chromium.launch({
  executablePath: await Chromium.executablePath(),
  args: ["--no-sandbox", "--disable-gpu"],
});
const page = await browser.newPage({ viewport: { width: Number(width), height: 800 }, colorScheme, locale: "en-US" });
const errors = [], requests = [];
page.on("console", message => ["error", "warning"].includes(message.type()) && errors.push(message.text()));
page.on("pageerror", error => errors.push(error.message));
page.on("request", request => requests.push(request.url()));
await page.goto("file://" + file);
await page.screenshot({ path: screenshot, fullPage: true });
const found = await page.evaluate(() => {
  const painted = canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] > 200) colours.add(pixels.slice(at, at + 3).join());
    return colours.size;
  };
  return {
    titles: [...document.querySelectorAll("figure h2")].map(head => head.textContent),
    colours: [...document.querySelectorAll("canvas")].map(painted),
    pageWidth: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    smallest: Math.min(...[...document.querySelectorAll("td, p, figcaption, .u-legend td")].map(cell => parseFloat(getComputedStyle(cell).fontSize))),
  };
});
await page.addScriptTag({ path: require.resolve("axe-core") }).catch(() => page.evaluate(require("axe-core").source));
const axe = await page.evaluate(() => window.axe.run());
await browser.close();
const violations = axe.violations.map(rule => rule.id + ": " + rule.nodes.map(node => node.html.slice(0, 120)).join(" | "));
console.log(JSON.stringify({ ...found, errors, requests, violations }));
