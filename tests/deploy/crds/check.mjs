// Check custom resources against the models of their definitions: types, patterns and unknown fields.
// Usage: node check.mjs < objects.json; prints the problems, one a line.
import { readFileSync } from "node:fs";
import ts from "typescript";

const MODULES = {
  "cert-manager.io/v1": "@kubernetes-models/cert-manager",
  "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api",
  "keda.sh/v1alpha1": "@kubernetes-models/keda",
  "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator",
};

const objects = JSON.parse(readFileSync(0, "utf8"));
const lines = [];
for (const [index, object] of objects.entries()) {
  const path = `${MODULES[object.apiVersion]}/${object.apiVersion}/${object.kind}`;
  const { [object.kind]: Model } = await import(path);
  try {
    new Model(object).validate();
  } catch (error) {
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
  // An object literal may have no other fields than its interface.
  lines.push(`import { I${object.kind} as I${index} } from "${path}"; export const o${index}: I${index} = ${JSON.stringify(object)};`);
}

const file = "objects.ts";
const options = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.NodeNext,
  moduleResolution: ts.ModuleResolutionKind.NodeNext,
};
const host = ts.createCompilerHost(options);
const { fileExists, getSourceFile } = host;
host.fileExists = (name) => name === file || fileExists(name);
host.getSourceFile = (name, target) =>
  name === file ? ts.createSourceFile(name, lines.join("\n"), target) : getSourceFile(name, target);
const program = ts.createProgram([file], options, host);
for (const found of ts.getPreEmitDiagnostics(program)) {
  const line = found.file?.getLineAndCharacterOfPosition(found.start).line ?? 0;
  console.log(`${objects[line].kind} ${objects[line].metadata.name}: ${ts.flattenDiagnosticMessageText(found.messageText, " ")}`);
}
