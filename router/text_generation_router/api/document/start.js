SwaggerUIBundle({
  url: new URL("../api-doc/openapi.json", document.currentScript.src).href,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
