"""Training scripts for ``tune run``; a package so that Python finds this folder before torchtune's own ``recipes``."""
