// A browser reads no index from files: the search would say "Searching..." for ever.
if (location.protocol === "file:") document.querySelector("[role=search]").remove();
