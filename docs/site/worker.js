// A page that is opened from a folder may not start a worker: the search's runs in a hidden frame instead.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), {hidden: true}));
    addEventListener("message", ({source, data}) => { if (source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", {data})); });
    const page = frame.contentWindow.document;
    this.ready = new Promise((done) => { frame.contentWindow.ready = done; });
    page.write(`<body><script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
        document.body.append(Object.assign(document.createElement("script"), {src: url, onload: done}));
      })), Promise.resolve());
    </` + `script><script src="${url}" onload="ready()"></` + "script>");
    page.close();
    this.frame = frame;
  }
  postMessage(data) { this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}))); }
  terminate() { this.frame.remove(); }
};
