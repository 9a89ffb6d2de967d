// Server-sent events over fetch: EventSource sends no headers, and so no API key.

/** Yields the events of a response: { name, data }. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = parse(text.slice(0, end));
      text = text.slice(end + 2);
      if (event) yield event;
    }
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

/** Returns the URL of a path of the server, wherever a proxy has put it. */
export const serverUrl = (path) => new URL(`../${path}`, import.meta.url);
