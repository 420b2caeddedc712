// MathJax renders only the elements that pymdownx.arithmatex has made from $formula$ and $$formula$$.
window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  options: {ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex"},
};
