(function(){"use strict";
var R=document.documentElement,$=function(s,e){return (e||document).querySelector(s)},$$=function(s,e){return [].slice.call((e||document).querySelectorAll(s))};
/* theme: auto, light, dark */
var tb=$("#theme"),modes=["auto","light","dark"],m=0;
try{m=Math.max(0,modes.indexOf(localStorage.getItem("testbed-theme")||"auto"))}catch(e){}
var q=/[?&]theme=(light|dark)/.exec(location.search);if(q)m=modes.indexOf(q[1]);
function theme(){if(m)R.setAttribute("data-theme",modes[m]);else R.removeAttribute("data-theme");tb.textContent="Theme: "+modes[m];try{localStorage.setItem("testbed-theme",modes[m])}catch(e){}}
tb.onclick=function(){m=(m+1)%3;theme()};theme();
/* definitions on hover and focus, read from the glossary */
var tip=$("#tip");
function show(el){var id=el.getAttribute("data-g")||el.getAttribute("href").slice(1),dt=document.getElementById(id);if(!dt)return;
 tip.textContent="";var b=document.createElement("b");b.textContent=dt.textContent;tip.appendChild(b);tip.appendChild(document.createTextNode(dt.nextElementSibling.textContent));tip.hidden=false;
 el.setAttribute("aria-describedby","tip");
 var r=el.getBoundingClientRect(),w=tip.offsetWidth,h=tip.offsetHeight,x=Math.min(Math.max(8,r.left),R.clientWidth-w-8),y=r.bottom+6;if(y+h>R.clientHeight)y=r.top-h-6;
 tip.style.left=x+scrollX+"px";tip.style.top=y+scrollY+"px"}
function hide(){tip.hidden=true}
$$(".def").forEach(function(el){el.addEventListener("mouseenter",function(){show(el)});el.addEventListener("mouseleave",hide);el.addEventListener("focus",function(){if(el.matches(":focus-visible"))show(el)});el.addEventListener("blur",hide)});
addEventListener("keydown",function(e){if(e.key==="Escape")hide()});
/* sort */
var tbody=$(".vt tbody");
$$(".vt .sort").forEach(function(b){b.addEventListener("click",function(){var th=b.closest("th"),c=+b.getAttribute("data-k"),cur=th.getAttribute("aria-sort"),dir=cur==="ascending"?"descending":cur==="descending"?"ascending":(b.hasAttribute("data-down")?"descending":"ascending");
 $$(".vt thead th[aria-sort]").forEach(function(t){t.setAttribute("aria-sort","none")});th.setAttribute("aria-sort",dir);
 $$("tr",tbody).sort(function(a,z){var d=a.children[c].getAttribute("data-s")-z.children[c].getAttribute("data-s");return (dir==="ascending"?d:-d)||a.getAttribute("data-i")-z.getAttribute("data-i")}).forEach(function(r){tbody.appendChild(r)})})});
/* copy the command */
var cp=$("#copy");if(cp)cp.onclick=function(){var t=$("#cmd").textContent,done=function(){cp.textContent="Copied";setTimeout(function(){cp.textContent="Copy"},1500)};if(navigator.clipboard&&isSecureContext)navigator.clipboard.writeText(t).then(done);else{var s=getSelection(),r=document.createRange();r.selectNodeContents($("#cmd"));s.removeAllRanges();s.addRange(r);try{document.execCommand("copy");done()}catch(e){}}};
})();
