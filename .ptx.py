import importlib.util,re
spec=importlib.util.spec_from_file_location('c','.c.py'); c=importlib.util.module_from_spec(spec); spec.loader.exec_module(c)
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile
for f in [(4,1024,4,2),(4,1024,4,1)]:
    b=c.builds(LaunchConfig(Tile(0,*f),Tile(0,16,256,4,18)))[0]
    k=c.compiled_for(b); t=''
    print(b.constexprs)
    for kind in ('ptx',):
        t=''
        for l in k.asm[kind].splitlines():
            if 'ld.global' in l: t+='L'
            elif 'bar.sync' in l: t+='B'
            elif 'fma' in l: t+='f'
            elif 'shfl' in l: t+='s'
            elif 'cvt.rn.f16x2' in l: t+='c'
        print(re.sub(r'(.)\1*',lambda m:m.group(1)+(str(len(m.group(0))) if len(m.group(0))>1 else ''),t)[:600])
