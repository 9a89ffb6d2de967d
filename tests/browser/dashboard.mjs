// Drives the dashboard in a real browser, behind a proxy with a path prefix, and prints what it found as JSON.

import { createServer, request } from "node:http";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { BROWSER_HOME, SERVER_PORT, IMAGES_PORT, PICTURE, KEY, PICTURES } = process.env;
const require = createRequire(`${BROWSER_HOME}/`);
const { chromium: driver } = require("playwright-core");
const { default: chromium } = await import(pathToFileURL(require.resolve("@sparticuz/chromium")));
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const PREFIX = "/models/";
const PORTS = { a: SERVER_PORT, b: IMAGES_PORT };
const HOSTILE = `<img src=x onerror="window.broken=1"><script>window.broken=1</script>`;
const SHOWN = ["overview", "tokens-chart", "requests-chart", "responses-chart", "ttft-chart", "itl-chart", "events", "errors", "replicas", "tenants", "playground", "ask", "settings"];

/** A reverse proxy that removes the prefix, which tells the server, and knows nothing else. */
const proxy = createServer((incoming, outgoing) => {
  if (proxy.pause) return outgoing.destroy();
  const port = incoming.url.startsWith(PREFIX) && PORTS[incoming.url[PREFIX.length]];
  if (!port) return outgoing.writeHead(404).end();
  const target = { port, path: incoming.url.slice(PREFIX.length + 1), method: incoming.method, headers: incoming.headers };
  const forwarded = request(target, (response) => {
    outgoing.writeHead(response.statusCode, response.headers);
    response.pipe(outgoing);
  });
  forwarded.on("error", () => outgoing.destroy());
  outgoing.on("close", () => forwarded.destroy());
  incoming.pipe(forwarded);
});
await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
const url = `http://127.0.0.1:${proxy.address().port}${PREFIX}a/dashboard`;

// With LANG=C and without a locale the browser has a language that Intl refuses, as in a container.
const env = { PATH: process.env.PATH, HOME: process.env.HOME, LANG: "C" };
const browser = await driver.launch({ executablePath: await chromium.executablePath(), args: ["--no-sandbox"], env });
const found = { problems: [], violations: [], foreign: [], boxes: {}, overflow: [], bytes: 0 };

async function open(colorScheme, width, height) {
  const context = await browser.newContext({ colorScheme, viewport: { width, height }, reducedMotion: "reduce" });
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && found.problems.push(message.text()));
  page.on("pageerror", (error) => found.problems.push(String(error)));
  page.on("request", (sent) => sent.url().startsWith(new URL(url).origin + PREFIX) || found.foreign.push(sent.url()));
  return page;
}

async function check(page, name) {
  await page.screenshot({ path: `${PICTURES}/${name}.png`, fullPage: true });
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run());
  found.violations.push(...violations.map((each) => `${name}: ${each.id}: ${each.nodes.map((node) => node.html).join(" ")}`));
}

async function logIn(page) {
  await page.goto(url);
  await page.waitForSelector("#key-dialog[open]");
  // The feed has asked; all who ask meanwhile get an answer.
  await page.evaluate(async () => {
    const { askForKey } = await import(new URL("dashboard/key.js", location.href));
    window.asked = Promise.all([askForKey(), askForKey()]);
  });
  await page.keyboard.type(KEY);
  await page.keyboard.press("Enter");
  await page.evaluate(() => window.asked);
  await page.waitForSelector('#status[data-state="live"]');
  await page.waitForFunction(() => document.querySelectorAll("#replicas-table tbody .badge").length > 0);
}

// The page, its key, and the playground, by keyboard.
const sizes = new Map();
const first = await open("light", 1280, 900);
first.on("response", async (response) => {
  if (response.ok() && !response.url().endsWith("/events")) sizes.set(response.url(), (await response.body().catch(() => "")).length);
});
found.paint = Infinity; // the best of several: the machine may be busy
for (let i = 0; i < 5 && found.paint > 300; i += 1) {
  await first.goto(url);
  const paint = await first.evaluate(async () => {
    while (!performance.getEntriesByName("first-contentful-paint").length) await new Promise((resolve) => setTimeout(resolve, 10));
    return performance.getEntriesByName("first-contentful-paint")[0].startTime;
  });
  found.paint = Math.min(found.paint, paint);
}
found.bytes = [...sizes.values()].reduce((total, size) => total + size, 0);
await check(first, "key");
await logIn(first);
await first.fill("#message", HOSTILE);
await first.fill("#max-tokens", "80");
await first.focus("#message");
await first.keyboard.press("Control+Enter");
await first.waitForFunction(() => document.querySelector("#usage").textContent.includes("new tokens"));
await first.focus(".assistant .tokens");
await first.keyboard.press("ArrowRight");
await first.keyboard.press("ArrowRight");
found.usage = await first.textContent("#usage");
found.answer = await first.textContent(".assistant .tokens");
found.question = await first.textContent(".user .text");
found.chosen = await first.getAttribute(".assistant .tokens", "aria-activedescendant");
found.alternatives = await first.locator("#token tbody tr").count();
await check(first, "light-desktop-chat");

await first.fill("#message", "count ".repeat(200));
await first.fill("#max-tokens", "1500");
await first.click("#send");
await first.waitForFunction(() => document.querySelectorAll(".assistant:last-child [role=option]").length > 5);
await first.click("#stop");
await first.waitForFunction(() => document.querySelector("#usage").textContent.startsWith("Stopped"));
await first.fill("#message", "x");
await first.evaluate(() => (document.querySelector("#ask").noValidate = true));
await first.fill("#max-tokens", "0");
await first.click("#send");
await first.waitForSelector(".failed");
found.refusal = await first.textContent(".failed .text");
await first.waitForFunction((text) => document.querySelector("#errors-table").textContent.includes(text), "max_tokens");
found.tenant = await first.textContent("#errors-table");
found.broken = await first.evaluate(() => [window.broken, document.querySelectorAll("main img, main script").length]);
found.problems = found.problems.filter((text) => !text.includes("422") && !text.includes("400")); // the refusal above
found.focus = [];
await first.evaluate(() => document.activeElement.blur());
for (let i = 0; i < 14; i += 1) {
  await first.keyboard.press("Tab");
  found.focus.push(await first.evaluate(() => document.activeElement.id || document.activeElement.textContent.trim().slice(0, 20) || document.activeElement.className || document.activeElement.value));
}

// A model that takes images. The first one takes none.
found.images = { offered: [await first.isVisible("#images")] };
const seeing = await open("light", 1280, 900);
await seeing.goto(url.replace("/a/", "/b/"));
await seeing.waitForSelector("#images");
found.images.offered.push(await seeing.isVisible("#images"));
const file = (text) => ({ name: "<b>red</b>.png", mimeType: "image/png", buffer: Buffer.from(text, "base64") });
const ask = async (...files) => {
  await seeing.setInputFiles("#images", files);
  await seeing.fill("#message", "What is this?");
  await seeing.click("#send");
  await seeing.waitForFunction(() => !document.querySelector("#send").disabled);
};
await ask(file(PICTURE), file(PICTURE));
found.images.usage = await seeing.textContent("#usage");
found.images.shown = await seeing.locator(".user img").evaluateAll((all) => all.map((each) => [each.naturalWidth, each.alt]));
found.images.kept = await seeing.evaluate(() => document.querySelector("#images").files.length);
await check(seeing, "images");
await ask(file("AAAA"));
found.images.refusal = await seeing.textContent(".failed .text");
await ask();
found.images.second = await seeing.textContent("#usage");
await seeing.context().close();
found.problems = found.problems.filter((text) => !text.includes("400"));

for (const [scheme, name, width, height] of [["light", "desktop", 1280, 900], ["dark", "desktop", 1280, 900], ["light", "phone", 390, 844], ["dark", "phone", 390, 844]]) {
  const page = await open(scheme, width, height);
  await logIn(page);
  await page.waitForFunction(() => !document.querySelector("#ttft-chart .amount").textContent.includes("undefined"));
  await check(page, `${scheme}-${name}`);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wide > 0) found.overflow.push(`${scheme}-${name}: ${wide} px`);
  found.boxes[`${scheme}-${name}`] = await page.evaluate((ids) => {
    const boxes = ids.map((id) => [id, document.getElementById(id).getBoundingClientRect()]);
    return Object.fromEntries(boxes.map(([id, box]) => [id, [Math.round(box.left), Math.round(box.width)]]));
  }, SHOWN);
  await page.context().close();
}

// A page that opens late, on a server that is sick; and a page whose charting library does not load.
const act = (name) => new Promise((resolve) => {
  process.stdin.once("data", resolve);
  console.error(`${name} please`);
});
await act("fail");
const sick = await open("dark", 1280, 900);
await logIn(sick);
await sick.waitForFunction(() => document.querySelectorAll("#events-list li").length > 2);
// The last refusal comes with the next sample.
await sick.waitForFunction(() => document.querySelector("#errors-table").textContent.includes("no-such-path/59"));
found.events = await sick.locator("#events-list li .badge").allTextContents();
found.errors = await sick.locator("#errors-table tbody tr").allTextContents();
found.errorsHeight = (await sick.locator("#errors").boundingBox()).height;
found.history = await sick.textContent("#tokens-chart .amount");
await sick.selectOption("#errors-kind", "faults");
found.faults = await sick.locator("#errors-table tbody tr").count();
await sick.selectOption("#errors-kind", "");
await sick.fill("#errors-find", "no-such-path");
found.unknown = await sick.locator("#errors-table tbody tr").allTextContents();
await sick.fill("#errors-find", "");
await sick.locator("#errors-table th button", { hasText: "Times" }).click();
found.sorted = await sick.locator('#errors-table th[aria-sort="descending"]').textContent();
await check(sick, "sick");
await act("hang");
await sick.waitForFunction(() => document.querySelector("#health-text").textContent.includes("hung"));
found.sick = [await sick.textContent("#health-text"), await sick.title(), await sick.getAttribute("link[rel=icon]", "href")];
await act("resume");
await sick.waitForFunction(() => !document.querySelector("#health-text").textContent.includes("0 of"));

const bare = await open("light", 1280, 900);
await bare.route("**/uPlot.iife.min.js", (route) => route.abort());
await logIn(bare);
await bare.waitForFunction(() => document.querySelector("#health-text").textContent.includes("replicas"));
await bare.waitForFunction(() => document.querySelector("#tokens-chart .amount").textContent);
found.bare = await bare.textContent("#tokens-chart .plot");
found.problems = found.problems.filter((text) => !text.includes("ERR_FAILED"));

// No connection: the page says since when, greys, and finds the server again.
proxy.pause = true;
proxy.closeAllConnections();
await sick.waitForSelector('#health[data-level="stale"]');
found.stale = [await sick.textContent("#health-text"), await sick.getAttribute("body", "data-connection"), await sick.title()];
await check(sick, "stale");
proxy.pause = false;
const began = Date.now();
await sick.waitForSelector('#health:not([data-level="stale"])');
found.again = Date.now() - began;
found.problems = found.problems.filter((text) => !/ERR_(EMPTY|CONNECTION|INCOMPLETE)/.test(text));
await browser.close();
proxy.closeAllConnections();
proxy.close();
process.stdin.destroy();
console.log(JSON.stringify(found));
