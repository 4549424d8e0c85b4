// A search that works where the site is opened from the disk: browsers start no Worker for file:// pages.
// The worker's script is run in a hidden frame instead, with messages handed over in both directions.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      const script = this.inside.document.createElement("script")
      script.src = url
      script.addEventListener("load", () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      })
      this.inside.document.body.append(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else setTimeout(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
